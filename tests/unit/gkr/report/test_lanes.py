"""Intervals follow from ends and durations."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkr.report.lanes import Span, lanes, visible
from gkr.report.record import RunRecord, read_record
from spec.events import (
    Applied,
    AttemptEnded,
    AttemptStarted,
    Event,
    Recovery,
    RunStatus,
    StepMetrics,
    SyncMember,
    SyncMerged,
)
from tests.builders.decoupled_run import LATENCY_SECONDS, NAMES, write_decoupled_run


def step(time: float, *, step: int, attempt: int = 1, **blocked: float) -> StepMetrics:
    return StepMetrics(
        time=time,
        source="rank/east/0",
        learner="east",
        attempt=attempt,
        step=step,
        position=step,
        round=0,
        loss=1,
        gradient_norm=1,
        learning_rate=1,
        steps_per_second=1,
        samples_per_second=1,
        blocked_seconds=blocked,
    )


def started(time: float, *, attempt: int) -> AttemptStarted:
    return AttemptStarted(time=time, source="driver/east", learner="east", attempt=attempt, epoch=attempt, world_size=1)


def record(*events: Event) -> RunRecord:
    return RunRecord(folder=Path("/run"), events=events)


def of(found: list[Span], state: str) -> list[tuple[float, float]]:
    return [(round(one.start, 3), round(one.end, 3)) for one in found if one.state == state]


def test_a_synchronisation_is_snapshot_then_wait_then_apply() -> None:
    applied = Applied(
        time=130, source="rank/east/0", learner="east", round=1, theta_sha256="a", waited_seconds=5, verdict="merged"
    )
    run = record(
        RunStatus(time=100, source="supervisor", status="preparing"),
        started(110, attempt=1),
        step(120, step=5),
        step(121, step=10),
        applied,
        step(136, step=15, snapshot=2, apply=1),
    )
    (lane,) = lanes(run)
    assert of(lane.spans, "applying") == [(122, 124), (129, 130)]
    assert of(lane.spans, "waiting") == [(124, 129)]
    assert of(lane.spans, "training") == [(110, 136)]


def test_starting_lasts_until_the_first_step_began_not_until_it_was_logged() -> None:
    run = record(
        RunStatus(time=100, source="supervisor", status="preparing"),
        started(110, attempt=1),
        step(120, step=5),
        step(125, step=10),
    )
    assert of(lanes(run)[0].spans, "starting") == [(100, 115)]


def test_a_restart_lasts_from_the_death_to_the_first_new_step() -> None:
    run = record(
        started(100, attempt=1),
        step(110, step=5),
        AttemptEnded(time=112, source="driver/east", learner="east", attempt=1, cause="rank 0: SIGKILL", samples_run=5),
        started(113, attempt=2),
        Recovery(
            time=118,
            source="driver/east",
            learner="east",
            what="rank 0",
            cause="SIGKILL",
            action="restarted",
            detected_seconds=0.5,
            first_step_seconds=6,
        ),
        step(120, step=10, attempt=2),
        step(130, step=20, attempt=2),
    )
    (lane,) = lanes(run)
    assert of(lane.spans, "restarting") == [(111.5, 117.5)]
    assert [one.time for one in lane.marks] == [118]
    assert "SIGKILL" in lane.marks[0].label


def test_an_attempt_that_never_came_back_restarts_until_the_end() -> None:
    run = record(
        started(100, attempt=1),
        step(110, step=5),
        AttemptEnded(time=112, source="driver/east", learner="east", attempt=1, cause="rank 0: SIGKILL", samples_run=5),
        started(113, attempt=2),
        RunStatus(time=140, source="supervisor", status="failed"),
    )
    assert of(lanes(run)[0].spans, "restarting") == [(112, 140)]


def test_the_syncer_collects_then_merges() -> None:
    merged = SyncMerged(
        time=50,
        source="syncer",
        round=1,
        epoch=1,
        members=[SyncMember(learner="east", generation=1, state="active")],
        open_seconds=4,
        merge_seconds=1,
        durable_seconds=2,
        outer_gradient_norm=1,
        samples_total=1,
        theta_sha256="a",
    )
    (lane,) = lanes(record(merged))
    assert lane.name == "syncer"
    assert of(lane.spans, "collecting") == [(43, 47)]
    assert of(lane.spans, "merging") == [(47, 50)]


def test_nothing_happened_is_no_lane() -> None:
    assert lanes(record()) == []
    assert lanes(record(started(1, attempt=1))) == []


@pytest.mark.parametrize("most", [2, 3])
def test_only_the_longest_spans_of_a_long_run_are_drawn_in_their_order(most: int) -> None:
    spans = [
        Span("waiting", 0, 1, ""),
        Span("training", 1, 9, ""),
        Span("waiting", 9, 12, ""),
        Span("waiting", 12, 14, ""),
    ]
    kept = visible(spans, most=most)
    assert kept == spans[1:3] if most == 2 else kept == spans[1:]


def test_in_decoupled_mode_a_contribution_flies_beside_training_and_only_counters_say_who_stood_still(
    tmp_path: Path,
) -> None:
    run = read_record(write_decoupled_run(tmp_path, fragments=2))
    found = {one.name: one for one in lanes(run)}
    assert list(found) == [*NAMES, "fragment 0", "fragment 1"]
    assert not of(found["east"].spans, "waiting")
    flights = [one for one in found["east"].spans if one.state == "flying"]
    assert len(flights) == len([one for one in run.of(Applied) if one.learner == "east"])
    assert all(one.end - one.start == pytest.approx(LATENCY_SECONDS + 0.57, abs=0.01) for one in flights)
    (stood,) = [one for one in found["west"].spans if one.state == "ahead"]
    assert stood.end - stood.start == pytest.approx(10, abs=0.5)
    assert not of(found["central"].spans, "ahead")
    merges = sum(len(of(found[f"fragment {one}"].spans, "merging")) for one in (0, 1))
    assert merges == len(run.of(SyncMerged))


def test_many_fragments_share_one_lane(tmp_path: Path) -> None:
    run = read_record(write_decoupled_run(tmp_path, fragments=16))
    assert [one.name for one in lanes(run)] == [*NAMES, "syncer"]
