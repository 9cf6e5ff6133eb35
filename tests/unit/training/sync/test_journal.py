"""Lines of the syncer, the driver and the ranks in files of events, on a disk that fills up in the middle of one."""

from __future__ import annotations

import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spec.events import Note, read_events
from training.event_log import EventLog
from training.sync.journal import Journal


@contextmanager
def files_up_to(size: int) -> Generator[None]:
    """No file of this process grows beyond a size: the kernel takes what fits, like a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def texts(path: Path) -> list[str]:
    return [one.text for one in read_events(path.read_text().splitlines()) if isinstance(one, Note)]


def test_the_syncer_loses_no_line_and_spoils_none_of_others(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal.note("one")
    with files_up_to(path.stat().st_size + 20):
        journal.note("two")
        journal.note("three")
        assert not path.read_text().endswith("\n"), "the first bytes of a line are there"
    journal.note("four")
    EventLog(path, source="driver/east").emit(Note, level="info", text="five")
    assert texts(path) == ["one", "two", "three", "four", "five"]


def test_a_driver_or_rank_hears_of_it_and_its_next_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = EventLog(path, source="driver/east")
    events.emit(Note, level="info", text="one")
    with files_up_to(path.stat().st_size + 20), pytest.raises(OSError, match="No space left"):
        events.emit(Note, level="info", text="two")
    events.emit(Note, level="info", text="three")
    assert texts(path) == ["one", "three"]
