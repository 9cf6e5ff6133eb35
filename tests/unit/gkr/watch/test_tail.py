from __future__ import annotations

from pathlib import Path

from gkr.watch.tail import EventTail, LineTail
from spec.events import Note, write_event


def test_only_whole_new_lines_and_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.read() == []
    path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.read() == [b"two", b"three"]
    assert tail.read() == []
    assert tail.rest() == b""


def test_unreadable_lines_and_unknown_kinds_are_skipped(tmp_path: Path) -> None:
    event = Note(time=1.0, source="x", text="here")
    torn, unknown = '{"time":1,"sour', '{"time":1,"source":"x","kind":"from_the_future"}'
    (tmp_path / "events.jsonl").write_text(f"{torn}\n{unknown}\n\n{write_event(event)}")
    assert EventTail(tmp_path).read() == [event]
