"""How a process of the trainer appends events: the driver to the run's file, a rank to its node's.

Whole lines, one write each to a file opened for appending, so that lines of several writers never mix.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from spec.events import write_event
from storage.lines import LineWriter


class EventLog:
    """One writer of one file."""

    def __init__(self, path: Path, *, source: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._source = source
        self._lines = LineWriter()

    def emit(self, kind: type[Any], **fields: Any) -> None:
        """Append one event of this writer, now."""
        self.line(write_event(kind(time=time.time(), source=self._source, **fields)))

    def line(self, text: str) -> None:
        """Append a line that another writer made. Raises OSError if the disk is full; no other line is spoilt then."""
        self._lines.write(self._descriptor, text.rstrip("\n").encode() + b"\n")
