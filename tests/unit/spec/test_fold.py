"""Events fold into the truth about a run, whatever of them is there."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.events import (
    Applied,
    AttemptEnded,
    AttemptStarted,
    Check,
    Event,
    LearnerFinished,
    Preflight,
    Recovery,
    Restored,
    RunStatus,
    Score,
    ServiceAsked,
    ServiceStats,
    StepMetrics,
    SyncFragmentLedger,
    SyncLedger,
    SyncMember,
    SyncMerged,
    read_event,
    read_events,
    write_event,
)
from spec.fold import fold
from spec.summary import Blocked, Copies, Ledger, Summary
from tests.builders.experiments import LOCAL, resolved

PLAN = resolved(LOCAL)
BATCH = 64


class Clock:
    """Each event a tenth of a second after the one before."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def step(clock: Clock, learner: str, *, attempt: int, step: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(
        time=clock(),
        source=f"rank/{learner}/0",
        learner=learner,
        attempt=attempt,
        step=step,
        position=step * BATCH,
        round=0,
        loss=loss,
        gradient_norm=1.0,
        learning_rate=1e-3,
        steps_per_second=5.0,
        samples_per_second=320.0,
        blocked_seconds={"barrier": 0.5 * step, "data": 9.0},
    )


def merged(clock: Clock, version: int, *, sha: str) -> SyncMerged:
    return SyncMerged(
        time=clock(),
        source="syncer",
        round=version,
        epoch=1,
        open_seconds=0.1,
        merge_seconds=0.1,
        durable_seconds=0.1,
        members=[SyncMember(learner=one.name, generation=1, state="merged") for one in PLAN.learners],
        outer_gradient_norm=1.0,
        samples_total=0,
        theta_sha256=sha,
    )


def applied(clock: Clock, learner: str, version: int, *, sha: str) -> Applied:
    return Applied(
        time=clock(),
        source=f"rank/{learner}/0",
        learner=learner,
        round=version,
        theta_sha256=sha,
        waited_seconds=0.1,
        verdict="merged",
    )


def a_run(rounds: int = 3, *, steps: int = 4, kill_east_after: int | None = None, finish: bool = True) -> list[Event]:
    """Two learners, barrier rounds; east may die once in the middle of a round and draw that round's samples again."""
    clock = Clock()
    log: list[Event] = [RunStatus(time=clock(), source="supervisor", status="running")]
    attempt = {"east": 1, "west": 1}
    run = {"east": 0, "west": 0}
    done = 0
    for learner in attempt:
        log.append(AttemptStarted(time=clock(), source="d", learner=learner, attempt=1, epoch=1, world_size=2))
        log.append(
            Restored(
                time=clock(), source="d", learner=learner, attempt=1, mode="fresh", step=0, position=0, samples_lost=0
            )
        )
    for version in range(1, rounds + 1):
        if kill_east_after is not None and version == 2:
            lost = kill_east_after * BATCH
            ended = run["east"] + lost
            log.append(step(clock, "east", attempt=1, step=done + kill_east_after))
            log.append(
                AttemptEnded(time=clock(), source="d", learner="east", attempt=1, cause="SIGKILL", samples_run=ended)
            )
            log.append(AttemptStarted(time=clock(), source="d", learner="east", attempt=2, epoch=2, world_size=2))
            log.append(
                Restored(
                    time=clock(),
                    source="d",
                    learner="east",
                    attempt=2,
                    mode="shared",
                    step=done,
                    position=done * BATCH,
                    samples_lost=lost,
                )
            )
            log.append(
                Recovery(
                    time=clock(),
                    source="d",
                    learner="east",
                    what="rank 1",
                    cause="SIGKILL",
                    action="restart",
                    detected_seconds=0.2,
                    first_step_seconds=3.0,
                    lost_steps=kill_east_after,
                )
            )
            attempt["east"], run["east"] = 2, 0
        done += steps
        for learner in attempt:
            run[learner] += steps * BATCH
            log.append(step(clock, learner, attempt=attempt[learner], step=done, loss=2.0 / version))
        log.append(merged(clock, version, sha=f"sha-{version}"))
        counts = dict.fromkeys(attempt, done * BATCH)
        log.append(
            SyncLedger(
                time=clock(),
                source="syncer",
                round=version,
                merged=counts,
                discarded=dict.fromkeys(attempt, 0),
            )
        )
        log.extend(applied(clock, learner, version, sha=f"sha-{version}") for learner in attempt)
    if finish:
        for learner in attempt:
            log.append(
                LearnerFinished(
                    time=clock(),
                    source="r",
                    learner=learner,
                    attempt=attempt[learner],
                    step=done,
                    samples_pending=0,
                    samples_discarded=0,
                    theta_sha256=f"sha-{rounds}",
                    round=rounds,
                    blocked_seconds={"barrier": 7.0, "snapshot": 1.0},
                )
            )
            log.append(
                AttemptEnded(
                    time=clock(),
                    source="d",
                    learner=learner,
                    attempt=attempt[learner],
                    cause="finished",
                    samples_run=run[learner],
                )
            )
        log.append(RunStatus(time=clock(), source="supervisor", status="succeeded", exit_code=0))
    return log


def test_a_run_without_trouble_balances_and_its_learners_agree() -> None:
    log = a_run()
    summary = fold(log, PLAN, versions={"gkr": "0.1.0"})
    assert (summary.status, summary.versions) == ("succeeded", {"gkr": "0.1.0"})
    assert summary.wall_seconds == pytest.approx(log[-1].time - log[0].time)
    assert summary.sync is not None
    assert summary.sync.model_dump() == {
        "mode": "barrier",
        "rounds": 3,
        "version": 3,
        "theta_sha256": "sha-3",
        "learners_agree": True,
        "ledger_imbalance": 0,
    }
    east = summary.learners[0]
    assert east.ledger == Ledger(run=768, merged=768)
    assert (east.steps, east.samples, east.restarts) == (12, 768, 0)
    assert east.final_loss == pytest.approx(2 / 3)
    assert east.blocked_seconds == Blocked(barrier=7.0, snapshot=1.0)


@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 6))
def test_a_death_in_the_middle_of_a_round_leaves_the_ledger_balanced(
    rounds: int, steps: int, killed_after: int
) -> None:
    summary = fold(a_run(rounds, steps=steps, kill_east_after=killed_after), PLAN)
    east = summary.learners[0]
    assert summary.sync is not None
    assert summary.sync.ledger_imbalance == 0
    assert summary.sync.learners_agree
    assert (east.restarts, east.ledger.lost) == (1, killed_after * BATCH)
    assert [one.lost_steps for one in summary.recoveries] == [killed_after]


def test_fragments_that_were_merged_at_different_times_balance_after_two_restarts() -> None:
    """Fragment 1 was merged up to 100 and goes first again; fragment 0 was ahead at 140, and dies once more at 130
    before anything is merged: it lost the 30 samples of that attempt, although its own cursor is beyond them.
    """
    clock = Clock()
    ended: dict[str, Any] = {"source": "d", "learner": "east", "cause": "SIGKILL"}
    again: dict[str, Any] = {"source": "d", "learner": "east", "mode": "shared", "step": 0, "position": 100}
    fresh: dict[str, Any] = {**again, "attempt": 1, "mode": "fresh", "position": 0, "samples_lost": 0}
    done: dict[str, Any] = {**ended, "cause": "finished", "attempt": 3, "samples_run": 60, "position": 160}
    held: dict[str, Any] = {"merged": [140, 100], "merged_until": [140, 100]}
    log: list[Event] = [
        Restored(time=clock(), **fresh),
        AttemptEnded(time=clock(), **ended, attempt=1, samples_run=150, position=150),
        Restored(time=clock(), **again, **held, attempt=2, samples_lost=50),
        AttemptEnded(time=clock(), **ended, attempt=2, samples_run=30, position=130),
        Restored(time=clock(), **again, **held, attempt=3, samples_lost=30),
        AttemptEnded(time=clock(), **done),
        SyncLedger(
            time=clock(), source="syncer", round=5, merged={"east": 160}, discarded={"east": 0},
            fragments=[
                SyncFragmentLedger(merged={"east": 200}, discarded={"east": 0}),
                SyncFragmentLedger(merged={"east": 160}, discarded={"east": 0}),
            ],
        ),
    ]  # fmt: skip
    summary = fold(log, PLAN)
    assert summary.learners[0].ledger == Ledger(run=240, merged=160, lost=80)
    assert summary.sync is not None
    assert summary.sync.ledger_imbalance == 0


def test_what_a_leaving_learner_gave_up_counts_although_no_round_follows() -> None:
    log = a_run()
    last = [one for one in log if isinstance(one, SyncLedger)][-1]
    left = last.model_copy(update={"time": last.time + 0.5, "discarded": {**last.discarded, "east": 8}})
    assert fold([*log, left], PLAN).learners[0].ledger.discarded == 8


def test_samples_that_nobody_accounts_for_show_as_an_imbalance() -> None:
    log = [one for one in a_run(kill_east_after=2) if not isinstance(one, Restored)]
    summary = fold(log, PLAN)
    assert summary.sync is not None
    assert summary.sync.ledger_imbalance == 2 * BATCH


def test_a_live_attempt_counts_by_its_latest_metrics() -> None:
    summary = fold(a_run(2, kill_east_after=3, finish=False), PLAN)
    assert summary.status == "running"
    assert [one.ledger.run for one in summary.learners] == [4 * BATCH + 3 * BATCH + 4 * BATCH, 8 * BATCH]


@pytest.mark.parametrize("who", ["east", "west"])
def test_learners_disagree_if_one_holds_other_weights_or_missed_the_last_version(who: str) -> None:
    log = a_run()
    other = [
        one.model_copy(update={"theta_sha256": "x"}) if isinstance(one, Applied) and one.learner == who else one
        for one in log
    ]
    late = [
        one
        for one in log
        if not (isinstance(one, (Applied, LearnerFinished)) and one.learner == who and one.round == 3)
    ]
    for wrong in (other, late):
        summary = fold(wrong, PLAN)
        assert summary.sync is not None
        assert not summary.sync.learners_agree


def test_a_syncer_that_says_two_things_about_one_version_is_found() -> None:
    log = a_run()
    clock = Clock()
    summary = fold([*log, merged(clock, 2, sha="other")], PLAN)
    assert summary.sync is not None
    assert (summary.sync.rounds, summary.sync.learners_agree) == (3, False)


def test_a_merge_reported_again_after_a_restart_counts_once() -> None:
    log = a_run()
    again = [one for one in log if isinstance(one, (SyncMerged, SyncLedger, AttemptEnded))]
    assert fold([*log, *again], PLAN).sync == fold(log, PLAN).sync


def test_no_event_at_all_is_a_run_in_preparation() -> None:
    summary = fold([], PLAN)
    assert (summary.status, summary.wall_seconds, [one.name for one in summary.learners]) == (
        "preparing",
        0.0,
        ["east", "west"],
    )
    assert summary.sync is not None
    assert not summary.sync.learners_agree


def test_a_loss_that_is_not_a_number_survives_the_file_and_is_no_final_loss() -> None:
    clock = Clock()
    log = [step(clock, "east", attempt=1, step=1, loss=0.5), step(clock, "east", attempt=1, step=2, loss=math.nan)]
    read = list(read_events(write_event(one) for one in log))
    assert len(read) == 2
    assert fold(read, PLAN).learners[0].final_loss == 0.5


def test_a_platforms_service_is_what_the_clients_of_the_run_asked_of_it() -> None:
    def asked(client: str, attempt: int, requests: int, *, errors: int = 0) -> ServiceAsked:
        return ServiceAsked(
            time=1.0, source="d", learner="east", service="captions", client=client, attempt=attempt,
            requests=requests, errors=errors, p50_ms=2.0, p99_ms=8.0 + attempt,
        )  # fmt: skip

    log = [
        asked("evaluation", 1, 5),
        asked("evaluation", 1, 9),
        asked("rank-0", 1, 100),
        asked("rank-0", 2, 50, errors=2),
    ]
    summary = fold(log, PLAN).services["captions"]
    assert (summary.requests, summary.errors, summary.p50_ms, summary.p99_ms) == (159, 2, 2.0, 10.0)


def test_services_are_merged_by_name_over_learners_replicas_and_incarnations() -> None:
    def stats(learner: str, incarnation: int, requests: int, p50: float, p99: float) -> ServiceStats:
        return ServiceStats(
            time=1.0,
            source="d",
            learner=learner,
            service="encoder",
            replica=0,
            incarnation=incarnation,
            requests=requests,
            errors=1,
            p50_ms=p50,
            p99_ms=p99,
            queued=0,
        )

    log = [
        stats("east", 1, 50, 9.0, 9.0),
        stats("east", 1, 100, 1.0, 5.0),
        stats("east", 2, 0, 0.0, 0.0),
        stats("west", 1, 300, 2.0, 4.0),
    ]
    summary = fold(log, PLAN).services["encoder"]
    assert (summary.requests, summary.errors, summary.p50_ms, summary.p99_ms) == (400, 3, 1.75, 5.0)


def test_the_final_score_outranks_later_ones() -> None:
    def score(time: float, accuracy: float, *, final: bool) -> Score:
        return Score(
            time=time,
            source="d",
            round=1,
            final=final,
            model_sha256="m",
            samples=8,
            classifier_accuracy=accuracy,
            classifier_accuracy_real=0.97,
            frechet_distance=1.0,
            frechet_distance_real=0.5,
        )

    log = [score(1, 0.5, final=False), score(2, 0.9, final=True), score(3, 0.1, final=False)]
    for events, want in ((log, 0.9), ([log[0], log[2]], 0.1)):
        evaluation = fold(events, PLAN).evaluation
        assert evaluation is not None
        assert evaluation.classifier_accuracy == want


def test_preflight_counts_the_last_result_of_each_node() -> None:
    def result(time: float, node: str, *verdicts: str) -> Preflight:
        checks = [
            Check.model_validate({"id": f"c{n}", "name": "n", "verdict": one, "value": "", "threshold": ""})
            for n, one in enumerate(verdicts)
        ]
        return Preflight(time=time, source="d", learner="east", node=node, checks=checks, seconds=time)

    log = [result(1, "a", "FAIL", "FAIL"), result(2, "a", "PASS", "WARN"), result(1.5, "b", "UNKNOWN", "PASS")]
    assert fold(log, PLAN).preflight.model_dump() == {
        "passed": 2,
        "warned": 1,
        "failed": 0,
        "unknown": 1,
        "seconds": 2.0,
    }


def test_one_learner_without_a_syncer_has_no_sync_part() -> None:
    plan = PLAN.model_copy(update={"syncer": None})
    assert fold(a_run(), plan).sync is None


@given(st.sets(st.integers(0, 60)), st.randoms(use_true_random=False), st.integers(0, 400))
def test_any_part_of_a_log_in_any_order_folds_and_order_does_not_matter(
    dropped: set[int], shuffle: random.Random, torn: int
) -> None:
    log = [one for index, one in enumerate(a_run(kill_east_after=2)) if index not in dropped]
    lines = [write_event(one) for one in log]
    if lines:
        lines[-1] = lines[-1][:torn]
    read = list(read_events(lines))
    mixed = list(read)
    shuffle.shuffle(mixed)
    summary = fold(read, PLAN)
    assert fold(mixed, PLAN) == summary
    assert Summary.read_json(summary.write_json()) == summary


@given(st.binary(max_size=80))
def test_a_damaged_line_is_skipped(line: bytes) -> None:
    assert read_event(line) is None


def test_the_summary_has_every_key_of_the_contract() -> None:
    dumped = fold(a_run(), PLAN).model_dump()
    assert {
        "status",
        "wall_seconds",
        "versions",
        "learners",
        "sync",
        "evaluation",
        "preflight",
        "services",
        "recoveries",
    } <= set(dumped)
    want = {
        "name",
        "cluster",
        "region",
        "steps",
        "samples",
        "steps_per_second",
        "final_loss",
        "restarts",
        "ledger",
        "blocked_seconds",
    }
    assert want <= set(dumped["learners"][0])


def test_waiting_is_a_share_of_the_time_behind_the_first_round_of_each_attempt() -> None:
    def told(at: float, *, attempt: int, version: int, data: float, services: float) -> Event:
        waited = {"data": data, "services": services}
        made = step(Clock(), "east", attempt=attempt, step=1)
        return made.model_copy(update={"time": at, "round": version, "waited_seconds": waited})

    log = [
        told(0, attempt=1, version=0, data=2.0, services=9.0),
        told(10, attempt=1, version=1, data=4.0, services=9.5),
        told(30, attempt=1, version=2, data=4.2, services=9.5),
        told(99, attempt=2, version=2, data=7.0, services=0.0),  # counters begin anew
        told(100, attempt=2, version=3, data=8.0, services=1.0),
        told(120, attempt=2, version=4, data=8.2, services=1.2),
    ]
    east = fold(log, PLAN).learners[0]
    assert (east.waited.data, east.waited.services) == pytest.approx((0.4 / 40, 0.2 / 40))
    short = fold([*log[:1], log[1].model_copy(update={"round": 0})], PLAN).learners[0]
    assert short.waited.data == pytest.approx(0.2), "a run of one round has nothing behind it"


def test_copies_are_counted_over_attempts_and_only_where_a_dataset_is_copied() -> None:
    def told(*, attempt: int, hits: int, fetched_bytes: int) -> Event:
        cache = {"hits": hits, "fetched_bytes": fetched_bytes, "evicted": 1}
        return step(Clock(), "east", attempt=attempt, step=1).model_copy(update={"cache": cache})

    log = [
        told(attempt=1, hits=1, fetched_bytes=100),
        told(attempt=1, hits=3, fetched_bytes=500),
        told(attempt=2, hits=2, fetched_bytes=0),  # counters begin anew
        step(Clock(), "west", attempt=1, step=1),
    ]
    copies = {one.name: one.copies for one in fold(log, PLAN).learners}
    assert copies == {"east": Copies(hits=5, fetched_bytes=500), "west": None}


def test_samples_of_steps_of_unequal_size_are_those_of_the_position() -> None:
    log = [one.model_copy(update={"position": 1234}) if isinstance(one, LearnerFinished) else one for one in a_run()]
    assert {one.samples for one in fold(log, PLAN).learners} == {1234}
