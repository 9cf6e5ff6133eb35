"""The supervisor's way to append to events.jsonl, also when the disk is full.

A few kilobytes are set aside at the start and given back on the first ENOSPC, so that a run that ends for want of space
can still say so.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from spec.events import Event, write_event
from storage.lines import LineWriter

_RESERVE_BYTES = 64 * 1024


class Journal:
    """One writer of a run's events. Every event goes out as one write to a file opened for appending."""

    def __init__(self, folder: Path) -> None:
        self._reserve = folder / "state" / "reserve"
        self._file = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lines = LineWriter()
        try:
            self._reserve.write_bytes(b"\0" * _RESERVE_BYTES)
        except OSError:
            self._reserve.unlink(missing_ok=True)  # full already: the first event will say it

    def append(self, event: Event) -> None:
        """Append with the time of now. A full disk costs the reserve once, then raises OSError."""
        line = write_event(event.model_copy(update={"time": time.time()})).encode()
        try:
            self._lines.write(self._file, line)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not self._reserve.exists():
                raise
            self._reserve.unlink(missing_ok=True)
            self._lines.write(self._file, line)
            raise  # written, but the caller has to end the run while it still can

    def close(self) -> None:
        self._reserve.unlink(missing_ok=True)
        os.close(self._file)
