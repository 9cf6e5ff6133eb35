"""What a new driver takes up from the events of the one before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spec import events as ev
from training.attempts import Ended, History, previous_attempts


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


def stepped(position: int) -> Any:
    rates = {
        "loss": 1.0,
        "gradient_norm": 1.0,
        "learning_rate": 0.1,
        "steps_per_second": 1.0,
        "samples_per_second": 64.0,
    }
    return said(ev.StepMetrics, attempt=2, step=position // 64, position=position, round=0, **rates)


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


def test_samples_of_an_attempt_count_from_where_it_was_restored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, started(1), restored(1, position=0), ended(1, position=1024), started(2))
    assert previous_attempts(path, learner="west").samples_run == 0  # it did not come so far
    write(
        path,
        started(1),
        restored(1, position=0),
        ended(1, position=1024),
        started(2),
        restored(2, position=640),
        stepped(960),
    )
    history = previous_attempts(path, learner="west")
    assert (history.samples_run, history.last_position, history.last_step, history.furthest) == (320, 960, 15, 960)


def test_a_later_position_that_was_restored_corrects_the_end_before_it() -> None:
    """The last event before the head died was at 2240; a checkpoint of 2560 exists, so 320 more samples were run."""
    known = Ended(number=2, cause="driver lost", samples_run=1280, position=2240)
    assert known.seen_from(2560) == Ended(number=2, cause="driver lost", samples_run=1600, position=2560)
    assert known.seen_from(2240) is known
    assert known.seen_from(1920) is known
