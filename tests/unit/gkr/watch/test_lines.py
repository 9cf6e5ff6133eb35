from __future__ import annotations

from gkr.watch.lines import LineWriter
from gkr.watch.view import initial_view
from spec.events import Check, Event, Preflight, Recovery, SyncWaiting
from tests.builders import local_runs
from tests.builders.watched import merged, step


def _lines(*events: Event) -> list[str]:
    writer = LineWriter(initial_view(local_runs.plan()))
    return [line.partition(" ")[2] for event in events for line in writer.feed(event)]


def test_steps_are_a_line_per_learner_and_ten_seconds() -> None:
    events = [step(name, index, time=1000.0 + index) for index in range(25) for name in ("east", "west")]
    assert len(_lines(*events)) == 2 * 3


def test_a_step_line_says_loss_speed_queue_share_and_time_left() -> None:
    (line,) = _lines(step("east", 80, time=100.0, loss=0.4123))
    assert line == "east: step 80, loss 0.4123, 8 steps/s, queue 4, 10% of 51.2k samples, 1m30s left"


def test_a_round_is_one_line() -> None:
    waiting = SyncWaiting(time=5.0, source="syncer", round=0, arrived=["east"], waiting_for=["west"], deadline=99.0)
    assert _lines(waiting, waiting, merged(1, samples_total=2_560, final=True)) == [
        "round 1 merged: east, west (1.5 s open), 2560 of 51.2k samples, final"
    ]


def test_a_failed_check_says_value_and_threshold() -> None:
    checks = [
        Check(id="H01", name="free disk", verdict="FAIL", value="1Gi", threshold="5Gi"),
        Check(id="H02", name="clock", verdict="PASS", value="0 s", threshold="2 s"),
    ]
    (line,) = _lines(
        Preflight(time=1.0, source="driver/east", learner="east", node="node-0", checks=checks, seconds=1.0)
    )
    assert line == "east: preflight of node-0: 1 PASS, 1 FAIL (free disk is 1Gi, needs 5Gi)"


def test_a_recovery_says_what_why_and_how_long() -> None:
    event = Recovery(
        time=1.0,
        source="driver/east",
        learner="east",
        what="rank 1",
        cause="SIGKILL",
        action="respawned",
        detected_seconds=0.1,
        first_step_seconds=8.13,
        lost_steps=3,
    )
    assert _lines(event) == ["recovered: rank 1 of east (SIGKILL), respawned; first step after 8.1 s, 3 steps lost"]
    event = Recovery(
        time=1.0, source="driver/east", learner="east", what="service judge-0", cause="no labels", action="given up",
        detected_seconds=0.1,
    )  # fmt: skip
    assert _lines(event) == ["lost: service judge-0 of east (no labels), given up"]
