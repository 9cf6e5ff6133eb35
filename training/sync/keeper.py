"""A rank's part of a contribution, kept until it has its verdict and sent again to a syncer that has lost it.

The syncer holds parts in memory only. So that its restart costs nothing, each rank looks from time to time whether
its part is still there, without any word between the ranks.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from dataclasses import dataclass

from spec.errors import GkrError
from training.sync.messages import PartHeader, PartReceipt, PartState, encode
from training.sync.transport import Link, SyncRefusedError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The exact bytes of one upload."""

    header: PartHeader
    body: tuple[bytes | memoryview, ...]

    @property
    def path(self) -> str:
        """Where its state is asked for."""
        return f"parts/{self.header.learner}/{self.header.generation}/{self.header.seq}/{self.header.rank}"


def pack(header: PartHeader, *payload: memoryview) -> Part:
    """A part as it travels."""
    text = encode(header)
    return Part(header=header, body=(len(text).to_bytes(4, "little") + text, *payload))


def send(part: Part, *, bulk: Link, until: float) -> PartReceipt:
    """Upload a part, as often as it takes."""
    return bulk.ask("part", method="PUT", body=part.body, until=until).read(PartReceipt)


class Keeper:
    """Watches over the newest part in a thread with connections of its own."""

    def __init__(
        self, control: Link, bulk: Link, *, check_seconds: float, send_seconds: float, closed: threading.Event
    ) -> None:
        self._control, self._bulk = control, bulk
        self._check_seconds, self._send_seconds = check_seconds, send_seconds
        self._closed = closed
        self._part: Part | None = None
        self._thread: threading.Thread | None = None

    def keep(self, part: Part) -> None:
        """Watch over this part; an older one is forgotten."""
        self._part = part
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="sync-keeper", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(self._check_seconds):
            part = self._part
            if part is None:
                continue
            try:
                state = self._control.ask_once(part.path, method="GET").read(PartState).state
                if state == "missing":
                    send(part, bulk=self._bulk, until=time.monotonic() + self._send_seconds)
                    _LOG.info("sent part %d of contribution %d again", part.header.rank, part.header.seq)
            except (SyncRefusedError, ValueError) as error:
                _LOG.warning("the part is not kept any longer: %s", error)
                state = "answered"
            except (OSError, http.client.HTTPException, GkrError) as error:
                _LOG.debug("the syncer is away: %s", error)
                continue
            if state == "answered" and self._part is part:
                self._part = None
