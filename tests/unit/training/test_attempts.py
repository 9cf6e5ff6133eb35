"""What a new driver takes up from the events of the one before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec import events as ev
from training.attempts import History, previous_attempts


def write(path: Path, *events: Any) -> None:
    path.write_text("".join(ev.write_event(event) for event in events))


def said(kind: type[Any], **fields: Any) -> Any:
    return kind(time=1.0, source="driver/west", learner="west", **fields)


def started(attempt: int) -> Any:
    return said(ev.AttemptStarted, attempt=attempt, epoch=attempt, world_size=2)


def ended(attempt: int, *, position: int) -> Any:
    return said(ev.AttemptEnded, attempt=attempt, cause="SIGKILL", samples_run=64, position=position)


def restored(attempt: int, *, position: int) -> Any:
    return said(ev.Restored, attempt=attempt, mode="exact", step=position // 64, position=position, samples_lost=0)


def test_no_events_are_no_history(tmp_path: Path) -> None:
    assert previous_attempts(tmp_path / "none.jsonl", learner="west") == History()


def test_an_attempt_without_an_end_is_open(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, started(1), restored(1, position=0), ended(1, position=1024), started(2), restored(2, position=640))
    assert previous_attempts(path, learner="west") == History(
        attempt=2, epoch=2, furthest=0, last_position=640, restored_at=640, last_time=1.0, open_attempt=True
    )


def test_what_is_lost_counts_from_the_end_of_the_last_attempt_not_from_the_furthest_ever(tmp_path: Path) -> None:
    """Attempt 1 reached 1024 and lost 384; attempt 2 only reached 704: a third one from 640 loses 64, not 384 again."""
    path = tmp_path / "events.jsonl"
    write(
        path,
        started(1), restored(1, position=0), ended(1, position=1024),
        started(2), restored(2, position=640), ended(2, position=704),
    )  # fmt: skip
    history = previous_attempts(path, learner="west")
    assert (history.last_position, history.open_attempt) == (704, False)


def test_another_learner_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, started(1), ended(1, position=64))
    assert previous_attempts(path, learner="east") == History()
