from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gkr.local.journal import Journal
from spec.events import Note, read_events


def _note(text: str) -> Note:
    return Note(time=0.0, source="supervisor", text=text)


def test_events_get_the_time_of_writing_and_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    journal = Journal(tmp_path)
    journal.append(_note("one"))
    journal.append(_note("two\nlines"))
    journal.close()
    texts = [
        event for event in read_events((tmp_path / "events.jsonl").read_text().splitlines()) if isinstance(event, Note)
    ]
    assert [note.text for note in texts] == ["one", "two\nlines"]
    assert all(note.time > 0 for note in texts)


def test_a_full_device_is_said_and_costs_the_reserve(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    journal = Journal(tmp_path)
    assert (tmp_path / "state" / "reserve").exists()
    with pytest.raises(OSError, match="No space") as raised:
        journal.append(_note("never written"))
    assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / "state" / "reserve").exists()
    journal.close()
