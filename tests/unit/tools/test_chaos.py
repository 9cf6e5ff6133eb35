"""What the campaign of the sync plans, and how it judges, on events that are written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from spec import events as ev
from tools.chaos import sync
from tools.chaos.schedule import KINDS, Fault, Kind, make_schedule, union_seconds

GOOD = sync.Outcome(
    rounds=100, merged_steps=3200, loss=0.6, ledger_imbalance=0, learners_agree=True, lost_samples=32,
    restarts=3, blocked_seconds=1.0,
)  # fmt: skip


def test_a_seed_names_one_schedule_with_every_kind_equally_often_inside_the_run() -> None:
    first, again, other = (make_schedule(seed, learners=sync.LEARNERS, seconds=100, each=3) for seed in (1, 1, 2))
    assert first == again != other
    assert Counter(one.kind for one in first) == dict.fromkeys(KINDS, 3)
    assert [one.at for one in first] == sorted(one.at for one in first)
    assert 10 <= first[0].at < first[-1].at < 60
    assert all((one.learner == "") == (one.kind == "kill syncer") for one in first)


def test_time_in_several_spans_counts_once() -> None:
    assert union_seconds([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 5.0
    assert union_seconds([]) == 0.0


def injection(kind: Kind, *, start: float, lasts: float = 0.0, learner: str = "elm") -> sync.Injection:
    who = "" if kind == "kill syncer" else learner
    return sync.Injection(Fault(at=0, kind=kind, learner=who, lasts=lasts), start, start + lasts)


def step(time: float, *, learner: str, attempt: int) -> ev.StepMetrics:
    return ev.StepMetrics(
        time=time, source="", learner=learner, attempt=attempt, step=1, position=16, round=0, loss=1.0,
        gradient_norm=1.0, learning_rate=0.1, steps_per_second=1.0, samples_per_second=16.0,
    )  # fmt: skip


def started(time: float, *, attempt: int) -> ev.AttemptStarted:
    return ev.AttemptStarted(time=time, source="", learner="elm", attempt=attempt, epoch=attempt, world_size=1)


def test_a_killed_learner_is_back_with_the_first_step_of_a_new_attempt() -> None:
    events: list[ev.Event] = [
        started(0, attempt=1), step(10.1, learner="elm", attempt=1), step(10.2, learner="oak", attempt=7),
        started(10.3, attempt=2), step(13, learner="elm", attempt=2),
    ]  # fmt: skip
    assert sync.recovery_seconds(injection("kill learner", start=10), events) == 3
    assert sync.recovery_seconds(injection("kill learner", start=14), events) is None


def test_a_stopped_learner_is_back_with_its_first_step_after_it_may_run() -> None:
    events: list[ev.Event] = [
        started(0, attempt=1),
        step(11, learner="elm", attempt=1),
        step(12.5, learner="elm", attempt=1),
    ]
    assert sync.recovery_seconds(injection("stop learner", start=10, lasts=2), events) == 2.5


@pytest.mark.parametrize(
    ("mode", "kind", "want"),
    [
        ("decoupled", "kill learner", 5.0),  # the victim's
        ("barrier", "kill learner", 20.0),  # everybody waits
        ("barrier", "kill syncer", 20.0),
        ("decoupled", "kill syncer", 8.0),  # all four trained on for 3 s
        ("decoupled", "partition", 2.0),
    ],
)
def test_dead_time_is_that_of_those_who_could_not_train(mode: str, kind: Kind, want: float) -> None:
    assert sync.dead_seconds([injection(kind, start=10)], [5.0], mode=mode, ahead=3.0, end=99.0) == want


def test_dead_time_after_the_end_does_not_count() -> None:
    assert sync.dead_seconds([injection("kill learner", start=10)], [5.0], mode="barrier", ahead=0, end=11.0) == 4.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rate": 0.96}, "merged steps per living second are 0.960"),
        ({"loss": 1.03}, "loss is 1.030"),
        ({"recoveries": [1.0, None]}, "1 faults were not got over"),
        ({"recoveries": [1.0]}, "1 of 2 faults were not made"),
        ({"rough": replace(GOOD, ledger_imbalance=-16)}, "ledger is off by -16"),
        ({"rough": replace(GOOD, learners_agree=False)}, "do not agree"),
        ({"rough": replace(GOOD, rounds=99)}, "99 rounds of 100"),
    ],
)
def test_every_promise_can_be_broken(change: dict[str, object], words: str) -> None:
    held: dict[str, object] = {
        "rough": GOOD,
        "rate": 0.98,
        "loss": 1.01,
        "rounds": 100,
        "planned": 2,
        "recoveries": [1.0, 2.0],
    }
    assert sync.broken_promises(**held) == []  # pyright: ignore[reportArgumentType]
    (found,) = sync.broken_promises(**{**held, **change})  # pyright: ignore[reportArgumentType]
    assert words in found
