"""The syncer's lines in the run's events file."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from spec.events import Note, SyncMerged, read_event, write_event
from storage.lines import LineWriter

_LOG = logging.getLogger(__name__)
_BACKLOG = 1000


class Journal:
    """Appends whole lines with one write each. A full disk delays lines, it never stops the syncer."""

    def __init__(self, path: Path, *, history: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        """`history`: a file with the events of earlier syncers of this run, where they are not in `path`."""
        self._path, self._history = path, history
        self._wall = wall
        self._lock = threading.Lock()
        self._backlog: list[bytes] = []
        self._lines = LineWriter()
        self.observers: list[Callable[[Any], None]] = []
        """Told of every event, whether it could be written or not."""

    def now(self) -> float:
        """Seconds since 1970."""
        return self._wall()

    def emit(self, event: Any) -> None:
        """Append one event, after those that could not be written before."""
        for tell in self.observers:
            tell(event)
        with self._lock:
            self._backlog = [*self._backlog, write_event(event).encode()][-_BACKLOG:]
            try:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    while self._backlog:
                        self._lines.write(descriptor, self._backlog[0])
                        del self._backlog[0]
                finally:
                    os.close(descriptor)
            except OSError as error:
                _LOG.warning("events file cannot be written, %d lines wait: %s", len(self._backlog), error)

    def note(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """A line for the person who watches, also in the log."""
        _LOG.log({"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}[level], text)
        self.emit(Note(time=self.now(), source="syncer", level=level, text=text))

    def has_merged(self, version: int) -> bool:
        """Whether the merge of that version is told already."""
        return any(_tells(path, version=version) for path in (self._path, self._history) if path and path.exists())


def _tells(path: Path, *, version: int) -> bool:
    with path.open("rb") as file:
        for line in file:
            if b'"sync_merged"' in line:
                event = read_event(line)
                if isinstance(event, SyncMerged) and event.round == version:
                    return True
    return False
