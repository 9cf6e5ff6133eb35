"""How the syncer says no: an HTTP status, a stable word for programs, a sentence for people; and how often it did."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from spec.errors import GkrError

_LOG = logging.getLogger(__name__)
STATUS = {
    "token": 401,
    "no_certificate": 403,
    "sender": 403,
    "unknown_run": 404,
    "unknown_path": 404,
    "unknown_version": 404,
    "unknown_model": 404,
    "bad_request": 400,
    "damaged": 422,
    "too_large": 413,
    "store_unavailable": 503,
    "stopping": 503,
}
"""Status by reason; every other reason is a conflict (409)."""
RETRY_STATUS = frozenset({500, 502, 503, 504})
_MOST_LOGGED = 1000


class Refusal(GkrError):  # noqa: N818  (an answer, not a failure)
    """Raised inside the syncer, sent as `ErrorReply`."""

    def __init__(self, reason: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason

    @property
    def status(self) -> int:
        return STATUS.get(self.reason, 409)


class RefusalLog:
    """What was refused, by reason. Each reason is logged once for each peer: one that insists must not fill a disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def note(self, reason: str, *, peer: str, message: str) -> None:
        """One refusal. `peer`: the learner by its certificate, else an address."""
        with self._lock:
            self._counts[reason] += 1
            first = (reason, peer) not in self._logged and len(self._logged) < _MOST_LOGGED
            if first:
                self._logged.add((reason, peer))
        _LOG.log(logging.WARNING if first else logging.DEBUG, "refused %s: %s (%s)", peer, message, reason)

    def counts(self) -> dict[str, int]:
        """Refusals so far, by reason."""
        with self._lock:
            return dict(sorted(self._counts.items()))
