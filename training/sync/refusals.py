"""How the syncer says no: an HTTP status, a stable word for programs, a sentence for people."""

from __future__ import annotations

from spec.errors import GkrError

STATUS = {
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


class Refusal(GkrError):  # noqa: N818  (an answer, not a failure)
    """Raised inside the syncer, sent as `ErrorReply`."""

    def __init__(self, reason: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason

    @property
    def status(self) -> int:
        return STATUS.get(self.reason, 409)
