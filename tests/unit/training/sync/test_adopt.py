from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from spec.errors import RefusedError
from training.sync.adopt import (
    FragmentState,
    LearnerSyncState,
    QuarantinedError,
    apply_action,
    catch_up,
    decide,
    restart,
)
from training.sync.messages import FragmentPlace, Registration, Verdict, VerdictKind

LIMIT = 80
AT_WORK = FragmentState(
    seq=3, merged_seq=2, base_version=2, pending_steps=10, pending_samples=40, in_flight=True, cursor=120,
    discarded_samples=7,
)  # fmt: skip
AHEAD = replace(AT_WORK.ran(4).ran(4), steps_to_due=18)
"""Two more steps have run since the snapshot."""


def answer(kind: VerdictKind, *, version: int = 3, final: bool = False) -> Verdict:
    return Verdict(kind=kind, version=version, samples_total=0, final=final, theta_sha256="", reason="because")


def place(*, version: int = 3, last_seq: int = 2, cursor: int = 80, pending: bool = False) -> FragmentPlace:
    return FragmentPlace(
        version=version,
        last_seq=last_seq,
        cursor=cursor,
        merged_samples=cursor,
        discarded_samples=9,
        contribution_pending=pending,
        theta_sha256="",
    )


def registration(*fragments: FragmentPlace, seed: bool = False) -> Registration:
    return Registration(
        generation=2,
        epoch=1,
        version=sum(one.version for one in fragments),
        samples_total=0,
        last_seq=max(one.last_seq for one in fragments),
        cursor=min(one.cursor for one in fragments),
        merged_samples=0,
        discarded_samples=9,
        contribution_pending=any(one.contribution_pending for one in fragments),
        seed_needed=seed,
        final=False,
        fragments=list(fragments),
    )


def learner(*fragments: FragmentState) -> LearnerSyncState:
    return LearnerSyncState(fragments=fragments)


def test_merged_takes_exactly_the_shared_weights_and_clears_what_was_pending() -> None:
    after, action = decide(AT_WORK, verdict=answer("merged"), pending_limit=LIMIT)
    assert (after.merged_seq, after.base_version, after.pending_samples, after.pending_steps) == (3, 3, 0, 0)
    assert (after.cursor, after.in_flight) == (120, False)
    theta, anchor, shared = (np.array([one], np.float32) for one in (0.1, 0.3, 1e-9))
    weights, base = apply_action(theta, action=action, anchor=anchor, shared=shared)
    assert weights.tobytes() == shared.tobytes() == base.tobytes()
    assert not np.shares_memory(weights, base)


def test_merged_keeps_the_steps_since_the_snapshot_on_top_of_the_shared_weights() -> None:
    after, action = decide(AHEAD, verdict=answer("merged"), pending_limit=LIMIT)
    assert action == "rebase"
    assert (after.pending_steps, after.pending_samples, after.since_samples, after.cursor) == (2, 8, 0, 128)
    assert (after.discarded_samples, after.steps_to_due) == (7, 18)
    theta, anchor, snapshot, shared = (np.array([one], np.float32) for one in (5.0, 3.0, 4.0, 10.0))
    weights, base = apply_action(theta, action=action, anchor=anchor, shared=shared, snapshot=snapshot)
    assert (weights[0], base[0]) == (11.0, 10.0)


def test_merged_with_overwrite_books_the_steps_since_the_snapshot_as_discarded() -> None:
    after, action = decide(AHEAD, verdict=answer("merged"), pending_limit=LIMIT, mode="overwrite")
    assert (action, after.pending_samples, after.discarded_samples, after.cursor) == ("assign", 0, 15, 128)
    assert after.steps_to_due == AHEAD.steps_to_due + 2, "a whole round of steps until the next one"


def test_late_carries_the_progress_onto_the_new_weights() -> None:
    after, action = decide(AHEAD, verdict=answer("late"), pending_limit=LIMIT)
    assert (after.base_version, after.pending_samples, after.merged_seq, action) == (3, 48, 2, "carry")
    assert (after.in_flight, after.since_samples) == (False, 0)
    theta, anchor, snapshot, shared = (np.array([one], np.float32) for one in (5.0, 4.0, 4.5, 10.0))
    weights, base = apply_action(theta, action=action, anchor=anchor, shared=shared, snapshot=snapshot)
    assert (weights[0], base[0]) == (11.0, 10.0)


def test_late_with_more_than_two_rounds_gives_up_and_books_it() -> None:
    after, action = decide(replace(AT_WORK, pending_samples=81), verdict=answer("late"), pending_limit=LIMIT)
    assert (action, after.pending_samples, after.discarded_samples) == ("assign", 0, 88)


def test_late_after_the_end_holds_the_final_weights_and_says_what_stayed_pending() -> None:
    after, action = decide(AT_WORK, verdict=answer("late", final=True), pending_limit=LIMIT)
    assert (action, after.pending_samples, after.discarded_samples) == ("assign", 40, 7)


def test_invalid_discards_and_the_third_in_a_row_ends_the_learner() -> None:
    after, action = decide(AHEAD, verdict=answer("invalid"), pending_limit=LIMIT)
    assert (action, after.discarded_samples, after.pending_samples, after.invalid_in_row) == ("assign", 55, 0, 1)
    again, _ = decide(after, verdict=answer("invalid"), pending_limit=LIMIT)
    with pytest.raises(QuarantinedError, match="too many contributions in a row"):
        decide(again, verdict=answer("invalid"), pending_limit=LIMIT)
    forgiven, _ = decide(again, verdict=answer("merged"), pending_limit=LIMIT)
    assert forgiven.invalid_in_row == 0


def test_a_learner_on_probation_ends_with_the_first_invalid_contribution() -> None:
    """It would train two more rounds for nothing: the syncer takes nothing more of it."""
    verdict = msgspec.structs.replace(answer("invalid"), quarantined=True)
    with pytest.raises(QuarantinedError, match="because"):
        decide(AHEAD, verdict=verdict, pending_limit=LIMIT)


def test_a_fenced_process_may_not_go_on() -> None:
    with pytest.raises(RefusedError, match="because"):
        decide(AT_WORK, verdict=answer("fenced"), pending_limit=LIMIT)


@pytest.mark.parametrize("kind", ["merged", "late", "invalid"])
@pytest.mark.parametrize("mode", ["rebase", "overwrite"])
@pytest.mark.parametrize("since", [0, 2, 30])
def test_no_sample_is_forgotten_whatever_the_answer(kind: VerdictKind, mode: str, since: int) -> None:
    before = AT_WORK
    for _ in range(since):
        before = before.ran(4)
    after, _ = decide(before, verdict=answer(kind), pending_limit=LIMIT, mode=mode)  # type: ignore[arg-type]
    merged = AT_WORK.pending_samples if kind == "merged" else 0
    here = before.pending_samples + before.discarded_samples
    assert merged + after.pending_samples + after.discarded_samples == here


def test_running_and_sending_move_the_counts() -> None:
    state = FragmentState(base_version=0).ran(4).ran(4).snapshot(inner_steps=20).ran(4)
    assert state == FragmentState(
        seq=1, base_version=0, pending_steps=3, pending_samples=12, in_flight=True, since_steps=1, since_samples=4,
        steps_to_due=19, cursor=12,
    )  # fmt: skip


def schedule(state: LearnerSyncState, *, inner_steps: int, steps: int) -> list[tuple[int, int]]:
    """(step, fragment) of every contribution, each answered at once."""
    found: list[tuple[int, int]] = []
    for step in range(1, steps + 1):
        state = state.ran(1)
        while (due := state.due()) is not None:
            found.append((step, due))
            sent = state.fragments[due].snapshot(inner_steps=inner_steps)
            verdict = answer("merged", version=sent.base_version + 1)
            state = state.change(due, decide(sent, verdict=verdict, pending_limit=LIMIT)[0])
    return found


def test_fragments_take_turns_each_once_per_round() -> None:
    whole = learner(FragmentState()).spread(inner_steps=20)
    assert schedule(whole, inner_steps=20, steps=60) == [(20, 0), (40, 0), (60, 0)]
    thirds = learner(*[FragmentState()] * 3).spread(inner_steps=10)
    turns = [(3, 0), (6, 1), (10, 2), (13, 0), (16, 1), (20, 2)]
    assert schedule(thirds, inner_steps=10, steps=20) == turns


def test_a_learner_that_comes_back_goes_on_with_the_fragment_the_others_wait_for() -> None:
    found = restart(None, registration=registration(place(version=2, cursor=30), place(version=1, cursor=20)))
    back = found.state.spread(inner_steps=20)
    assert back.cursor == 20
    assert [one for _, one in schedule(back, inner_steps=20, steps=40)] == [1, 0, 1, 0]


def test_a_fragment_that_fell_behind_goes_first() -> None:
    ahead, behind = FragmentState(base_version=5, steps_to_due=3), FragmentState(base_version=4, steps_to_due=13)
    assert [one.steps_to_due for one in learner(ahead, behind).in_order().fragments] == [13, 3]


def test_after_a_late_answer_what_comes_next_is_due_at_once_and_the_order_stays() -> None:
    state = LearnerSyncState(fragments=(FragmentState(base_version=4), FragmentState(base_version=3)))
    state = state.spread(inner_steps=20)
    assert state.due() is None
    hurried = state.hurry()
    assert hurried.due() == 1, "the one that is furthest behind"
    assert [one.steps_to_due for one in hurried.fragments] == [10, 0]


def test_no_second_contribution_of_a_fragment_in_flight() -> None:
    flying = learner(replace(AT_WORK, steps_to_due=-5), FragmentState(steps_to_due=1))
    assert flying.due() is None
    assert flying.ran(4).due() == 1
    assert flying.in_flight == [0]


def test_the_checkpoint_form_reads_back_and_ignores_what_it_does_not_know() -> None:
    state = learner(AHEAD, FragmentState())
    form = json.loads(json.dumps({**state.to_dict(), "newer_field": 1}))
    assert LearnerSyncState.from_dict(form) == state


def test_restart_is_exact_when_the_syncer_merged_nothing_that_the_checkpoint_does_not_know() -> None:
    found = restart(learner(AT_WORK), registration=registration(place(version=2)))
    assert (found.mode, found.catch_up) == ("exact", ())
    assert found.state == learner(replace(AT_WORK, discarded_samples=9, in_flight=False))


def test_restart_is_exact_but_has_to_catch_up_when_others_went_on() -> None:
    found = restart(learner(AT_WORK), registration=registration(place(version=3)))
    assert (found.mode, found.catch_up) == ("exact", (0,))
    after, action = catch_up(found.state.fragments[0], version=3, pending_limit=LIMIT)
    assert (after.base_version, after.pending_samples, action) == (3, 40, "carry")


def test_a_checkpoint_made_in_flight_is_exact_if_the_contribution_was_never_merged() -> None:
    """Its samples are pending on the checkpoint's anchor as before; the next contribution has a new number."""
    found = restart(learner(AHEAD), registration=registration(place(version=2, last_seq=2)))
    (state,) = found.state.fragments
    assert found.mode == "exact"
    assert (state.pending_samples, state.in_flight, state.since_samples) == (48, False, 0)
    assert state.snapshot().seq == 4


def test_a_checkpoint_made_in_flight_gives_way_to_the_syncer_if_the_contribution_was_merged() -> None:
    """Its samples are in the shared weights; those after its snapshot are lost and drawn again."""
    found = restart(learner(AHEAD), registration=registration(place(version=3, last_seq=3, cursor=120)))
    (state,) = found.state.fragments
    assert found.mode == "shared"
    assert (state.cursor, state.pending_samples, state.base_version, state.merged_seq) == (120, 0, 3, 3)


def test_restart_is_shared_when_a_later_contribution_was_merged() -> None:
    found = restart(learner(AT_WORK), registration=registration(place(last_seq=3, cursor=120)), inner_steps=10)
    assert found.mode == "shared"
    assert found.state == learner(
        FragmentState(seq=3, merged_seq=3, base_version=3, cursor=120, discarded_samples=9, steps_to_due=10)
    )


def test_one_fragment_that_went_on_makes_the_whole_restart_shared() -> None:
    saved = learner(AT_WORK, replace(AT_WORK, merged_seq=1))
    found = restart(saved, registration=registration(place(), place(last_seq=2, cursor=60)))
    assert found.mode == "shared"
    assert {one.cursor for one in found.state.fragments} == {60}


def test_restart_without_checkpoint_is_shared_or_fresh() -> None:
    assert restart(None, registration=registration(place())).mode == "shared"
    joiner = restart(None, registration=registration(place(last_seq=0, cursor=0)))
    assert (joiner.mode, joiner.state.fragments[0].base_version, joiner.state.cursor) == ("fresh", 3, 0)
    first = restart(None, registration=registration(place(version=-1, last_seq=0, cursor=0), seed=True))
    assert (first.mode, first.state.fragments[0].base_version) == ("fresh", -1)


def test_restart_waits_while_the_former_contribution_is_in_the_open_round() -> None:
    found = registration(place(version=2), place(version=2, pending=True))
    assert restart(learner(AT_WORK, AT_WORK), registration=found).mode == "wait"


def test_restart_refuses_a_syncer_that_forgot() -> None:
    for version, last_seq in ((1, 2), (2, 1), (-1, 0)):
        with pytest.raises(RefusedError, match="the syncer only has version"):
            restart(learner(AT_WORK), registration=registration(place(version=version, last_seq=last_seq)))
