"""Follows a run's events from outside, as `gkr watch` does, for tests that act when something has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spec.events import Event, read_event

Found = TypeVar("Found")


class Follower:
    """All events so far of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._offset = 0
        self.events: list[Event] = []

    def read(self) -> None:
        """Take in what was appended."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.events += [event for line in whole.splitlines() if (event := read_event(line)) is not None]

    def until(self, find: Callable[[list[Event]], Found | None], *, deadline_seconds: float, what: str) -> Found:
        """The first thing that `find` finds; fails with the last events when the deadline passes or the run ends
        before."""
        deadline, tick = time.monotonic() + deadline_seconds, threading.Event()
        while True:
            self.read()
            found = find(self.events)
            if found is not None:
                return found
            tail = "\n".join(event.model_dump_json() for event in self.events[-8:])
            assert not any(e.kind == "run_status" and e.exit_code is not None for e in self.events), (
                f"ended before: {what}\n{tail}"
            )
            assert time.monotonic() < deadline, f"not within {deadline_seconds} s: {what}\n{tail}"
            tick.wait(0.1)
