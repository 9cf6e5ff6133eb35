from __future__ import annotations

from gkr.watch.view import initial_view
from spec.events import Event, LearnerFinished, Note, Recovery, RunStatus, SyncWaiting
from tests.builders import local_runs
from tests.builders.watched import merged, seen, step


def test_progress_counts_all_learners_towards_the_target_and_never_beyond() -> None:
    view = seen(step("east", 100), step("west", 60))
    assert view.samples == 160 * 64
    assert view.eta_seconds == (51_200 - 160 * 64) / 1024
    assert seen(step("east", 10_000)).samples == 51_200
    assert seen(merged(3, samples_total=5_000)).samples == 5_000


def test_who_is_waited_for_is_forgotten_when_the_round_is_merged() -> None:
    waiting = SyncWaiting(time=5.0, source="syncer", round=0, arrived=["east"], waiting_for=["west"], deadline=99.0)
    sync = seen(waiting).sync
    assert sync is not None
    assert (sync.waiting_for, sync.deadline) == (("west",), 99.0)
    after = seen(waiting, merged(1, samples_total=2_560)).sync
    assert after is not None
    assert (after.version, after.waiting_for, after.deadline) == (1, (), None)


def test_a_merge_of_another_fragment_does_not_end_the_wait() -> None:
    waiting = SyncWaiting(time=5.0, source="syncer", round=4, fragment=1, arrived=["east"], waiting_for=["west"])
    other = merged(7, samples_total=2_560)
    sync = seen(waiting, other).sync
    assert sync is not None
    assert (sync.version, sync.waiting_for) == (7, ("west",))
    after = seen(waiting, other, other.model_copy(update={"fragment": 1})).sync
    assert after is not None
    assert after.waiting_for == ()


def test_histories_stay_short_however_long_the_run() -> None:
    events: list[Event] = [step("east", index) for index in range(1000)]
    events += [Note(time=1.0, source="x", text=f"{index}") for index in range(50)]
    view = seen(*events)
    assert len(view.learners["east"].losses) == 120
    assert [note.text for note in view.notes][-1] == "49"
    assert len(view.notes) == 5


def test_a_learner_that_is_not_in_the_plan_is_ignored() -> None:
    assert seen(step("stranger", 1)).learners == initial_view(local_runs.plan()).learners


def test_the_fate_is_kept() -> None:
    view = seen(RunStatus(time=1.0, source="supervisor", status="failed", reason="why", exit_code=5))
    assert (view.status, view.reason, view.exit_code) == ("failed", "why", 5)


def test_recoveries_are_counted_beyond_those_shown() -> None:
    one = Recovery(
        time=1.0,
        source="driver/east",
        learner="east",
        what="rank 1",
        cause="SIGKILL",
        action="respawned",
        detected_seconds=0.1,
    )
    view = seen(*[one] * 9)
    assert (view.num_recoveries, len(view.recoveries)) == (9, 5)


def test_after_the_end_nobody_trains_and_nobody_is_waited_for() -> None:
    waiting = SyncWaiting(time=5.0, source="syncer", round=0, arrived=["east"], waiting_for=["west"], deadline=99.0)
    finished = LearnerFinished(
        time=6.0, source="x", learner="west", attempt=1, step=9, samples_pending=0, samples_discarded=0,
        theta_sha256="", round=1, blocked_seconds={},
    )  # fmt: skip
    over = RunStatus(time=7.0, source="supervisor", status="cancelled", reason="on request", exit_code=103)
    view = seen(step("east", 8), step("west", 9), waiting, finished, over)
    assert {name: one.state for name, one in view.learners.items()} == {"east": "ended", "west": "finished"}
    assert view.learners["east"].steps_per_second == 0
    assert view.eta_seconds is None
    assert view.sync is not None
    assert (view.sync.waiting_for, view.sync.deadline) == ((), None)
