"""Curves follow from events."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from gkr.report.record import RunRecord, read_record
from gkr.report.series import (
    answers,
    by_step,
    received,
    round_steps,
    samples_per_second,
    services,
    staleness,
    validation,
    waits,
)
from spec.events import Applied, AttemptStarted, Event, ServiceStats, StepMetrics, SyncMerged, Validation
from tests.builders.decoupled_run import write_decoupled_run


def step(time: float, *, step: int, attempt: int = 1, learner: str = "east") -> StepMetrics:
    return StepMetrics(
        time=time,
        source="rank",
        learner=learner,
        attempt=attempt,
        step=step,
        position=step * 10,
        round=0,
        loss=1 / step,
        gradient_norm=1,
        learning_rate=1,
        steps_per_second=1,
        samples_per_second=1,
    )


def applied(time: float, *, number: int, waited: float, learner: str = "east") -> Applied:
    return Applied(
        time=time,
        source="rank",
        learner=learner,
        round=number,
        theta_sha256="a",
        waited_seconds=waited,
        verdict="merged",
    )


def stats(time: float, *, replica: int, p50: float, queued: dict[str, int], learner: str = "east") -> ServiceStats:
    return ServiceStats(
        time=time,
        source="driver",
        learner=learner,
        service="encoder",
        replica=replica,
        incarnation=1,
        requests=1,
        errors=0,
        p50_ms=p50,
        p99_ms=p50 * 2,
        queued=sum(queued.values()),
        queued_by_rank=queued,
    )


def record(*events: Event) -> RunRecord:
    first = AttemptStarted(time=0, source="driver", learner="east", attempt=1, epoch=1, world_size=1)
    return RunRecord(folder=Path("/run"), events=(first, *events))


def test_a_repeated_stretch_of_steps_is_a_new_piece_of_the_line() -> None:
    curve = by_step(
        record(step(1, step=5), step(2, step=10), step(9, step=7, attempt=2)),
        learner="east",
        value=lambda one: one.loss,
    )
    assert curve.x == [5, 10, 7, 7]
    assert [math.isnan(value) for value in curve.y] == [False, False, True, False]


def test_validation_stands_at_the_step_that_its_learner_had_reached() -> None:
    run = record(
        step(1, step=20),
        applied(2, number=1, waited=0),
        Validation(time=2.1, source="rank", learner="east", round=1, loss=0.5),
        step(3, step=25),
        Validation(time=9, source="rank", learner="east", round=7, loss=0.1),
    )
    assert round_steps(run) == {1: 20.0}
    assert validation(run).x == [20.0, 25.0]
    assert validation(run).y == [0.5, 0.1]


def test_waits_are_by_round_and_learner_with_gaps() -> None:
    rounds, waited = waits(record(applied(1, number=1, waited=3), applied(2, number=2, waited=4)))
    assert rounds == [1, 2]
    assert waited == {"east": [3, 4]}


def test_of_several_replicas_the_slowest_counts_and_the_queues_add() -> None:
    run = record(
        stats(1, replica=0, p50=4, queued={"east/rank-0": 1}),
        stats(2, replica=1, p50=9, queued={"east/rank-0": 2, "east/rank-1": 1}),
        stats(3, replica=1, p50=2, queued={}),
    )
    (found,) = services(run)
    assert found.p50["east"].y == [4, 9, 4]
    assert found.queued["east/rank-0"].y == [1, 3, 1]
    assert found.queued["east/rank-1"].y == [0, 1, 0]


def test_common_throughput_counts_each_sample_once() -> None:
    run = record(*(step(float(i), step=i) for i in range(1, 61)))
    curve = samples_per_second(run)
    width = 60 / len(curve.x)
    assert math.isclose(sum(curve.y) * width, 59 * 10)


def test_staleness_bytes_and_answers_of_a_decoupled_run(tmp_path: Path) -> None:
    run = read_record(write_decoupled_run(tmp_path, fragments=2))
    merged = run.of(SyncMerged)
    stale = {one.name: one for one in staleness(run)}
    assert sum(len(one.y) for one in stale.values()) == len(merged)
    assert max(stale["west"].y) > max(stale["east"].y), "the slow learner is the stale one"
    assert received(run).y[-1] == pytest.approx(sum(one.bytes_in for one in merged) / 1e6)
    waited = {one.name: one.y for one in answers(run)}
    assert max(waited["west"]) > 10 > max(waited["east"]), "the cut learner waited through its partition"
