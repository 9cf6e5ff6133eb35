"""The state of the sync as events tell it."""

from __future__ import annotations

from pathlib import Path

from gkr.syncing.told import closed, told_status
from spec.events import Event, Note, SyncLedger, SyncMember, SyncMerged, SyncWaiting
from tests.builders.synthetic_run import INNER_STEPS, synthetic_events, synthetic_plan

PLAN = synthetic_plan()


def merged(round_: int, *, time: float = 2.0, **more: object) -> SyncMerged:
    fields = {
        "time": time, "source": "syncer", "round": round_, "epoch": 3, "open_seconds": 1.0, "merge_seconds": 0.25,
        "durable_seconds": 0.25, "outer_gradient_norm": 1.5, "samples_total": 3200, "theta_sha256": "a" * 64,
        "members": [SyncMember(learner="east", generation=2, state="ACTIVE", arrived_seconds=0.0, staleness=4)],
    }  # fmt: skip
    return SyncMerged.model_validate({**fields, **more})


def test_before_the_first_event_the_home_learner_has_to_seed() -> None:
    status, seen = told_status(PLAN, [])
    assert (status.state, status.seed_from, status.version, seen) == ("SEEDING", "east", -1, 0.0)
    assert [one.learner for one in status.members] == ["central", "east"]
    assert len(status.fragments) == 1


def test_an_open_round_says_who_is_waited_for_and_until_when() -> None:
    waiting = SyncWaiting(time=3.0, source="syncer", round=8, arrived=["east"], waiting_for=["central"], deadline=120.0)
    status, seen = told_status(PLAN, [merged(7), waiting])
    (fragment,) = status.fragments
    assert (fragment.version, fragment.round, fragment.stage) == (7, 8, "OPEN")
    assert (fragment.why, fragment.until, seen) == ("waits for central", 120.0, 3.0)
    closed, _ = told_status(PLAN, [merged(7), waiting, merged(8)])
    assert (closed.fragments[0].stage, closed.fragments[0].waiting_for) == ("", [])


def test_each_fragment_keeps_its_own_version_and_staleness() -> None:
    events: list[Event] = [merged(7, fragment=0, fragment_version=4), merged(8, fragment=2, fragment_version=3)]
    status, _ = told_status(PLAN, events)
    assert {one.fragment: one.version for one in status.fragments} == {0: 4, 2: 3}
    assert status.version == 8
    east = next(one for one in status.members if one.learner == "east")
    assert (east.generation, east.staleness) == (2, [4, 0, 4])


def test_an_alarm_stands_until_the_next_merge() -> None:
    alarm = Note(time=3.0, source="syncer", level="error", text="the disk is full")
    assert told_status(PLAN, [merged(7), alarm])[0].alarm == "the disk is full"
    assert told_status(PLAN, [merged(7), alarm, merged(8)])[0].alarm == ""


def test_the_count_says_that_the_weights_are_final(tmp_path: Path) -> None:
    """In decoupled mode a run is made final after its last merge, so that the merge's own event does not say it."""
    events = [
        one.model_copy(update={"final": False}) if isinstance(one, SyncMerged) else one
        for one in synthetic_events(tmp_path)
    ]
    opened = SyncWaiting(time=events[-1].time, source="syncer", round=17, arrived=[], waiting_for=[])
    final, _ = told_status(PLAN, [*events, opened])
    assert (final.state, final.fragments[0].stage) == ("FINAL", "")
    said = next(at for at, one in enumerate(events) if isinstance(one, SyncLedger) and one.final)
    assert told_status(PLAN, events[:said])[0].state == "SERVING"
    assert told_status(PLAN, events[: said + 1])[0].state == "FINAL"


def test_a_whole_run_is_told_to_its_end(tmp_path: Path) -> None:
    status, _ = told_status(PLAN, synthetic_events(tmp_path))
    assert (status.state, status.final, status.version) == ("FINAL", True, 16)
    assert status.samples_total == status.target_samples
    assert [one.step for one in status.members] == [16 * INNER_STEPS] * 2
    assert all(one.blocked_seconds["barrier"] > 0 for one in status.members)
    assert all(one.merged_samples == status.samples_total // 2 for one in status.members)


def test_a_run_that_ended_before_its_last_merge_waits_for_nobody() -> None:
    waiting = SyncWaiting(time=3.0, source="syncer", round=8, arrived=["east"], waiting_for=["central"], deadline=120.0)
    status = closed(told_status(PLAN, [merged(7), waiting])[0])
    assert (status.state, status.version) == ("ENDED", 7)
    (fragment,) = status.fragments
    assert (fragment.stage, fragment.waiting_for, fragment.until, fragment.version) == ("", [], None, 7)
    assert {one.state for one in status.members} == {"ended"}
    assert closed(told_status(PLAN, [])[0]).seed_from == ""


def test_a_run_that_was_merged_to_the_end_stays_final(tmp_path: Path) -> None:
    final, _ = told_status(PLAN, synthetic_events(tmp_path))
    assert closed(final) == final
