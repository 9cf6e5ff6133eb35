from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spec.errors import RefusedError
from training.sync.adopt import LearnerSyncState, QuarantinedError, apply_action, catch_up, decide, restart
from training.sync.messages import Registration, Verdict, VerdictKind

LIMIT = 80
AT_WORK = LearnerSyncState(
    seq=3, merged_seq=2, base_version=2, pending_steps=10, pending_samples=40, cursor=120, discarded_samples=7
)


def answer(kind: VerdictKind, *, version: int = 3, final: bool = False) -> Verdict:
    return Verdict(kind=kind, version=version, samples_total=0, final=final, theta_sha256="", reason="because")


def registration(
    *, version: int = 3, last_seq: int = 2, cursor: int = 80, pending: bool = False, seed: bool = False
) -> Registration:
    return Registration(
        generation=2,
        epoch=1,
        version=version,
        samples_total=0,
        last_seq=last_seq,
        cursor=cursor,
        merged_samples=cursor,
        discarded_samples=9,
        contribution_pending=pending,
        seed_needed=seed,
        final=False,
    )


def test_merged_takes_exactly_the_shared_weights_and_clears_what_was_pending() -> None:
    after, action = decide(AT_WORK, verdict=answer("merged"), pending_limit=LIMIT)
    assert (after.merged_seq, after.base_version, after.pending_samples, after.pending_steps) == (3, 3, 0, 0)
    assert after.cursor == 120
    theta, anchor, shared = (np.array([one], np.float32) for one in (0.1, 0.3, 1e-9))
    weights, base = apply_action(theta, action=action, anchor=anchor, shared=shared)
    assert weights.tobytes() == shared.tobytes() == base.tobytes()
    assert not np.shares_memory(weights, base)


def test_late_carries_the_progress_onto_the_new_weights() -> None:
    after, action = decide(AT_WORK, verdict=answer("late"), pending_limit=LIMIT)
    assert (after.base_version, after.pending_samples, after.merged_seq, action) == (3, 40, 2, "carry")
    theta, anchor, shared = (np.array([one], np.float32) for one in (5.0, 4.0, 10.0))
    weights, base = apply_action(theta, action=action, anchor=anchor, shared=shared)
    assert (weights[0], base[0]) == (11.0, 10.0)


def test_late_with_more_than_two_rounds_gives_up_and_books_it() -> None:
    after, action = decide(replace(AT_WORK, pending_samples=81), verdict=answer("late"), pending_limit=LIMIT)
    assert (action, after.pending_samples, after.discarded_samples) == ("assign", 0, 88)


def test_late_after_the_end_holds_the_final_weights_and_says_what_stayed_pending() -> None:
    after, action = decide(AT_WORK, verdict=answer("late", final=True), pending_limit=LIMIT)
    assert (action, after.pending_samples, after.discarded_samples) == ("assign", 40, 7)


def test_invalid_discards_and_the_third_in_a_row_ends_the_learner() -> None:
    after, action = decide(AT_WORK, verdict=answer("invalid"), pending_limit=LIMIT)
    assert (action, after.discarded_samples, after.invalid_in_row) == ("assign", 47, 1)
    again, _ = decide(after, verdict=answer("invalid"), pending_limit=LIMIT)
    with pytest.raises(QuarantinedError, match="3 contributions in a row"):
        decide(again, verdict=answer("invalid"), pending_limit=LIMIT)
    forgiven, _ = decide(again, verdict=answer("merged"), pending_limit=LIMIT)
    assert forgiven.invalid_in_row == 0


def test_a_fenced_process_may_not_go_on() -> None:
    with pytest.raises(RefusedError, match="because"):
        decide(AT_WORK, verdict=answer("fenced"), pending_limit=LIMIT)


def test_running_and_sending_move_the_counts() -> None:
    state = LearnerSyncState(base_version=0).ran(4).ran(4).snapshot()
    assert state == LearnerSyncState(seq=1, base_version=0, pending_steps=2, pending_samples=8, cursor=8)


def test_the_checkpoint_form_reads_back_and_ignores_what_it_does_not_know() -> None:
    assert LearnerSyncState.from_dict({**AT_WORK.to_dict(), "newer_field": 1}) == AT_WORK


def test_restart_is_exact_when_the_syncer_merged_nothing_that_the_checkpoint_does_not_know() -> None:
    found = restart(AT_WORK, registration=registration(version=2))
    assert (found.mode, found.catch_up) == ("exact", False)
    assert found.state == replace(AT_WORK, discarded_samples=9)


def test_restart_is_exact_but_has_to_catch_up_when_others_went_on() -> None:
    found = restart(AT_WORK, registration=registration(version=3))
    assert (found.mode, found.catch_up) == ("exact", True)
    after, action = catch_up(found.state, version=3, pending_limit=LIMIT)
    assert (after.base_version, after.pending_samples, action) == (3, 40, "carry")


def test_restart_is_shared_when_a_later_contribution_was_merged() -> None:
    found = restart(AT_WORK, registration=registration(last_seq=3, cursor=120))
    assert found.mode == "shared"
    assert found.state == LearnerSyncState(seq=3, merged_seq=3, base_version=3, cursor=120, discarded_samples=9)


def test_restart_without_checkpoint_is_shared_or_fresh() -> None:
    assert restart(None, registration=registration()).mode == "shared"
    late_joiner = restart(None, registration=registration(last_seq=0, cursor=0))
    assert (late_joiner.mode, late_joiner.state.base_version, late_joiner.state.cursor) == ("fresh", 3, 0)
    first = restart(None, registration=registration(version=-1, last_seq=0, cursor=0, seed=True))
    assert (first.mode, first.state.base_version) == ("fresh", -1)


def test_restart_waits_while_the_former_contribution_is_in_the_open_round() -> None:
    assert restart(AT_WORK, registration=registration(version=2, pending=True)).mode == "wait"


def test_restart_refuses_a_syncer_that_forgot() -> None:
    for version, last_seq in ((1, 2), (2, 1), (-1, 0)):
        with pytest.raises(RefusedError, match="the syncer only has version"):
            restart(AT_WORK, registration=registration(version=version, last_seq=last_seq))
