"""A rank's parts of contributions, kept until they have their verdict and sent again to a syncer that has lost them.

The syncer holds parts in memory only. So that its restart costs nothing, each rank looks from time to time whether
its parts are still there, without any word between the ranks.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time

from spec.errors import GkrError
from training.sync.carrier import Carrier, Parcel
from training.sync.messages import PartHeader, PartState
from training.sync.transport import Link, SyncRefusedError

_LOG = logging.getLogger(__name__)


class Keeper:
    """Watches over the newest part of each fragment in a thread with a control connection of its own."""

    def __init__(
        self, control: Link, *, carrier: Carrier, check_seconds: float, send_seconds: float, closed: threading.Event
    ) -> None:
        self._control, self._carrier = control, carrier
        self._check_seconds, self._send_seconds = check_seconds, send_seconds
        self._closed = closed
        self._lock = threading.Lock()
        self._parts: dict[int, Parcel] = {}
        self.resends = 0
        """Parts that were sent again."""
        self._thread: threading.Thread | None = None

    def keep(self, part: Parcel) -> None:
        """Watch over this part; an older one of the fragment is forgotten."""
        with self._lock:
            self._parts[_header(part).fragment] = part
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="sync-keeper", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(self._check_seconds):
            with self._lock:
                parts = list(self._parts.values())
            for part in parts:
                self._look(part)

    def _look(self, part: Parcel) -> None:
        header = _header(part)
        place = f"{header.learner}/{header.generation}/{header.fragment}/{header.seq}/{header.rank}"
        try:
            state = self._control.ask_once(f"parts/{place}", method="GET").read(PartState).state
            if state == "missing":
                self._carrier.send(part, until=time.monotonic() + self._send_seconds)
                self.resends += 1
                _LOG.info("sent part %s again", place)
        except (SyncRefusedError, ValueError) as error:
            _LOG.warning("the part is not kept any longer: %s", error)
            state = "answered"
        except (OSError, http.client.HTTPException, GkrError) as error:
            _LOG.debug("the syncer is away: %s", error)
            return
        with self._lock:
            if state == "answered" and self._parts.get(header.fragment) is part:
                del self._parts[header.fragment]


def _header(part: Parcel) -> PartHeader:
    assert isinstance(part.header, PartHeader)
    return part.header
