"""Decoupled windows, fragments and the end of a decoupled run, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.builders.sync_machine import Shell, kind, reason
from training.sync.events import Answer, Drained, Finish, Leave, Remark, Wait
from training.sync.members import MOST_STALENESS, Rules

RULES = Rules(
    run="r1",
    contract="c",
    learners=("east", "north", "west"),
    target_samples=10_000,
    mode="decoupled",
    inner_steps=20,
    round_deadline=30,
    lease=5,
    norm_minimum=4,
)
DRAINS = replace(RULES, target_samples=100)


def started(rules: Rules = RULES, *, step_seconds: float = 0.0) -> Shell:
    shell = Shell(rules)
    for learner in rules.learners:
        shell.register(learner)
    shell.seed()
    for learner in rules.learners:
        shell.beat(learner, step_seconds=step_seconds)
    return shell


def draining(rules: Rules = DRAINS) -> Shell:
    """The target is reached by a contribution of east to each fragment."""
    shell = started(rules)
    for fragment in range(rules.fragments):
        shell.send("east", 1, fragment=fragment)
        shell.merge(fragment)
    assert shell.state.ledger.draining
    return shell


def finishes(shell: Shell) -> bool:
    return any(isinstance(one, Finish) for one in shell.effects)


def test_without_a_known_pace_the_first_arrival_is_merged_alone() -> None:
    shell = started()
    assert isinstance(shell.send("east", 1), Wait)
    assert (shell.stage, shell.state.rounds[0].share) == ("SEALED", 1 / 3)
    shell.merge()
    assert (shell.state.version, shell.state.waiting_for()) == (1, [])


def test_a_window_waits_for_its_grace_and_takes_who_comes_in_it() -> None:
    shell = started(step_seconds=1)
    shell.send("east", 1)
    # Half of the slack of half a round of 20 steps.
    assert shell.state.rounds[0].deadline == 5
    assert shell.state.waiting_for() == ["north", "west"]
    shell.pass_time(4, alive=RULES.learners, step_seconds=1)
    assert isinstance(shell.send("west", 1), Wait)
    assert (shell.stage, shell.state.rounds[0].deadline) == ("OPEN", 5)
    shell.pass_time(1, alive=RULES.learners, step_seconds=1)
    assert (shell.stage, shell.state.rounds[0].share) == ("SEALED", 2 / 3)
    assert not [one for one in shell.effects if isinstance(one, Remark)], "an ordinary end of a window is no news"


def test_a_window_closes_when_everybody_is_there() -> None:
    shell = started(step_seconds=1)
    for learner in ("east", "west", "north"):
        assert shell.stage == "OPEN"
        shell.send(learner, 1)
    assert (shell.stage, shell.state.rounds[0].share) == ("SEALED", 1)


def test_who_falls_silent_is_not_waited_for() -> None:
    shell = started(step_seconds=100)
    shell.send("east", 1)
    shell.pass_time(6, alive=("east", "west"), step_seconds=100)
    assert shell.state.waiting_for() == ["west"]
    shell.send("west", 1)
    assert (shell.stage, shell.state.rounds[0].share) == ("SEALED", 1)


def test_what_the_sync_takes_shortens_the_grace() -> None:
    shell = started(step_seconds=1)
    for learner in RULES.learners:
        shell.send(learner, 1)
    shell.now += 6  # merging and writing
    shell.merge()
    for learner in RULES.learners:
        shell.beat(learner, step_seconds=1)
    shell.send("east", 2)
    assert shell.state.rounds[0].deadline == shell.now + 0.5 * (10 - 6)


def test_the_fastest_learner_sets_the_pace() -> None:
    shell = started(step_seconds=3)
    shell.beat("west", step_seconds=1)
    shell.send("east", 1)
    assert shell.state.rounds[0].deadline == 5


def test_a_quorum_of_two_waits_for_the_second_until_the_deadline() -> None:
    shell = started(replace(RULES, quorum=2))
    shell.send("east", 1)
    shell.pass_time(9, alive=RULES.learners)
    assert shell.stage == "OPEN"
    shell.send("west", 1)
    assert shell.stage == "SEALED"
    shell.merge()
    shell.send("east", 2)
    shell.pass_time(30, alive=RULES.learners)
    assert shell.stage == "SEALED"
    said = [one.text for one in shell.effects if isinstance(one, Remark)]
    assert said == ["round 2 closes at its deadline without north, west"]


def test_a_quorum_is_never_more_than_the_learners_that_live() -> None:
    shell = started(replace(RULES, quorum=3))
    shell.pass_time(6, alive=("east",))
    shell.send("east", 1)
    assert shell.stage == "SEALED"


def test_a_stale_base_is_taken_and_told_and_a_very_stale_one_is_late() -> None:
    shell = started()
    most = MOST_STALENESS * 3
    for seq in range(1, most + 1):
        shell.send("east", seq)
        shell.merge()
    assert isinstance(shell.send("west", 1, base=0), Wait)
    assert shell.state.rounds[0].staleness("west") == most
    shell.merge()
    found = shell.send("west", 1, base=0)
    assert isinstance(found, Answer)
    assert (found.answered.kind, found.answered.staleness) == ("merged", most)
    late = shell.send("north", 1, base=0)
    assert isinstance(late, Answer)
    assert (late.answered.kind, f"at most {most} may be between" in late.answered.reason) == ("late", True)
    assert kind(shell.send("north", 2, base=most + 2)) == "invalid", "a base from the future"


def test_a_learner_is_never_merged_twice_in_one_window() -> None:
    shell = started(step_seconds=1)
    shell.send("east", 1)
    assert reason(shell.send("east", 2)) == "contribution_pending"
    shell.pass_time(5, alive=RULES.learners, step_seconds=1)
    assert isinstance(shell.send("west", 1), Wait), "the window is sealed"
    assert set(shell.state.rounds[0].arrivals) == {"east"}


def test_fragments_have_windows_versions_and_counts_of_their_own() -> None:
    shell = started(replace(RULES, fragments=2), step_seconds=1)
    shell.send("east", 1, fragment=1)
    shell.send("west", 1, fragment=0)
    assert [len(one.arrivals) for one in shell.state.rounds] == [1, 1]
    shell.send("north", 1, fragment=1)
    shell.send("west", 1, fragment=1)
    assert (shell.stage_of(0), shell.stage_of(1)) == ("OPEN", "SEALED")
    shell.merge(1)
    assert (shell.state.versions, shell.state.version, shell.state.ledger.samples_total) == ([0, 1], 1, 0)
    assert shell.state.members["west"].record.places[1].merged_samples == 100
    assert kind(shell.send("west", 1, fragment=1)) == "merged"
    assert isinstance(shell.send("west", 1, fragment=0), Wait)
    assert reason(shell.send("west", 1, fragment=2, base=0)) == "bad_request"


def test_a_barrier_run_is_final_when_the_last_fragment_reaches_the_target() -> None:
    rules = replace(RULES, mode="barrier", fragments=2, learners=("east",), target_samples=100)
    shell = started(rules)
    shell.send("east", 1, fragment=0)
    shell.merge(0)
    assert not shell.state.ledger.final
    shell.send("east", 1, fragment=1)
    shell.merge(1)
    assert shell.state.ledger.final
    assert not shell.state.rounds


def test_a_round_that_is_sealed_is_merged_before_the_run_is_final() -> None:
    rules = replace(RULES, mode="barrier", fragments=2, learners=("east",), target_samples=100)
    shell = started(rules)
    shell.send("east", 1, fragment=0)
    shell.merge(0)
    shell.send("east", 1, fragment=1)
    shell.send("east", 2, fragment=0)
    assert (shell.stage_of(0), shell.stage_of(1)) == ("SEALED", "SEALED")
    shell.merge(1)
    assert not shell.state.ledger.final
    shell.merge(0)
    assert shell.state.ledger.final
    assert [one.samples_total for one in shell.state.ledger.fragments] == [200, 100]


# --- what holds in both modes


def test_an_old_message_that_comes_again_changes_nothing() -> None:
    shell = started()
    for seq in (1, 2):
        shell.send("east", seq)
        shell.merge()
    before = shell.state
    assert reason(shell.send("east", 1, base=0)) == "replayed"
    assert shell.state == before
    assert kind(shell.send("east", 2)) == "merged"


@pytest.mark.parametrize(
    "change", [{"problem": "not finite"}, {"base": 99}, {"samples": 0}, {"norm": 1e9}, {"last": True}]
)
def test_a_verdict_outlives_the_syncer(change: dict[str, Any]) -> None:
    shell = started()
    for seq in range(1, 6):
        shell.send("east", seq)
        shell.merge()
    assert kind(shell.send("west", 1, **change)) == "invalid"
    shell.restart()
    for seq in range(6, 9):  # what is usual may change meanwhile; the verdict may not
        shell.send("east", seq, norm=9.0)
        shell.merge()
    assert kind(shell.send("west", 1, **change)) == "invalid"
    assert shell.state.members["west"].record.merged_samples == 0


def test_a_quarantined_learner_is_taken_again_only_when_it_registers() -> None:
    shell = started()
    for seq in (1, 2, 3):
        shell.send("west", seq, problem="bad")
    assert shell.state.members["west"].state == "quarantined"
    found = shell.send("west", 4)
    assert isinstance(found, Answer)
    assert "quarantined" in found.answered.reason
    shell.restart()
    assert shell.state.members["west"].state == "quarantined"
    generation = shell.register("west")
    assert isinstance(shell.send("west", 5, generation=generation), Wait)


def test_who_was_taken_again_after_a_quarantine_is_not_in_it_again_because_the_syncer_restarts() -> None:
    shell = started()
    for seq in (1, 2, 3):
        shell.send("west", seq, problem="bad")
    generation = shell.register("west")
    shell.restart()
    assert shell.state.members["west"].state == "active"
    assert isinstance(shell.send("west", 4, generation=generation), Wait)
    # It is on probation all the same: one more mistake, and it is there again.
    generation = shell.register("east")
    for seq in (1, 2, 3):
        shell.send("east", seq, generation=generation, problem="bad")
    generation = shell.register("east")
    shell.send("east", 4, generation=generation, problem="bad")
    assert shell.state.members["east"].state == "quarantined"


# --- the end


def test_the_target_drains_the_run_and_everybodys_last_contribution_ends_it() -> None:
    shell = draining()
    assert (shell.state.ledger.final, finishes(shell)) == (False, False)
    shell.send("west", 1, base=0, last=True, samples=7)
    assert (shell.stage, shell.state.waiting_for()) == ("OPEN", ["east", "north"])
    shell.send("north", 1, base=0, last=True, samples=8)
    shell.send("east", 2, last=True, samples=9)
    assert shell.stage == "SEALED"
    assert not finishes(shell)
    shell.merge()
    assert finishes(shell)
    assert kind(shell.send("west", 1, base=0, last=True)) == "merged"
    assert not shell.state.ledger.final
    shell.finish()
    assert (shell.state.ledger.final, shell.state.ledger.samples_total, shell.state.rounds) == (True, 124, ())
    late = shell.send("west", 2)
    assert isinstance(late, Answer)
    assert late.answered.reason == "the run is final"


def test_what_learners_have_trained_counts_before_it_is_merged() -> None:
    shell = started(replace(RULES, target_samples=300))
    shell.beat("east", kept=120)
    shell.beat("west", kept=130)
    assert shell.state.remaining == 50
    shell.send("east", 1)  # 100 of the 120
    shell.merge()
    assert shell.state.remaining == 50, "what is merged does not count twice"
    shell.beat("north", kept=60)
    assert (shell.state.remaining, shell.state.ledger.draining) == (0, False)


def test_what_a_learner_that_is_lost_had_trained_is_to_be_trained_again() -> None:
    shell = started(replace(RULES, target_samples=300))
    for learner in RULES.learners:
        shell.beat(learner, kept=100)
    assert shell.state.remaining == 0
    shell.pass_time(6, alive=("east", "north"))
    assert shell.state.remaining == 100, "a silent learner's samples may never come"
    shell.beat("west")
    assert shell.state.remaining == 0, "they are still there"
    shell.register("west")
    assert shell.state.remaining == 0, "the new process has not said yet what it has taken up"
    shell.beat("west", kept=40)
    assert shell.state.remaining == 60


def test_at_the_end_a_window_waits_only_for_those_who_have_something_to_send() -> None:
    shell = started(replace(RULES, target_samples=300, quorum=2), step_seconds=1)
    shell.send("east", 1)
    assert shell.state.waiting_for() == ["north", "west"]
    shell.send("north", 1)
    shell.pass_time(5, alive=RULES.learners, step_seconds=1)
    shell.merge()
    for learner in RULES.learners:
        shell.beat(learner, kept=100)
    shell.send("west", 1, base=0)
    assert shell.stage == "SEALED"
    shell.merge()
    assert shell.state.ledger.draining


def test_who_has_nothing_to_send_says_that_it_is_drained() -> None:
    shell = draining()
    for learner in ("east", "west"):
        shell.do(Drained(now=shell.now, learner=learner, generation=1))
    assert not finishes(shell)
    shell.send("north", 1, base=0, last=True)
    assert shell.stage == "SEALED", "nobody else has anything to send"
    shell.merge()
    assert finishes(shell)


def test_nobody_drains_a_run_that_goes_on() -> None:
    shell = started()
    assert reason(shell.do(Drained(now=0, learner="east", generation=1))[0]) == "not_draining"
    assert kind(shell.send("east", 1, last=True)) == "invalid"


def test_after_its_last_contribution_nothing_of_a_learner_is_taken() -> None:
    shell = draining()
    shell.do(Drained(now=shell.now, learner="east", generation=1))
    assert kind(shell.send("east", 2)) == "invalid"
    generation = shell.register("east")
    assert shell.state.members["east"].record.drained == [], "a new process may have something to send"
    assert isinstance(shell.send("east", 3, generation=generation, last=True), Wait)


def test_what_is_in_flight_closes_as_usual_so_that_fragments_cannot_wait_for_each_other() -> None:
    shell = draining(replace(DRAINS, fragments=2))
    shell.send("west", 1, base=0, fragment=0)
    assert shell.stage_of(0) == "SEALED"
    shell.send("north", 1, base=0, fragment=1)
    assert shell.stage_of(1) == "SEALED"


def test_the_run_ends_at_its_deadline_whoever_is_missing() -> None:
    shell = draining()
    shell.send("west", 1, base=0, last=True)
    shell.pass_time(31, alive=RULES.learners)
    assert shell.stage == "SEALED", "the last window closes at its deadline"
    shell.merge()
    assert finishes(shell)
    missing = [one.text for one in shell.effects if isinstance(one, Remark) and "without the last" in one.text]
    assert missing == ["the run ends at its deadline without the last contribution of east, north"]
    assert isinstance(shell.send("east", 2), Wait), "it will hear that the run is final"


def test_a_pause_of_the_syncer_does_not_end_a_run_that_drains() -> None:
    """Last contributions that could not come in the meantime would be lost."""
    shell = draining()
    shell.pass_time(1, alive=RULES.learners)
    shell.now += 1000
    shell.beat("east")
    assert not finishes(shell)
    shell.send("west", 1, base=0, last=True)
    shell.send("north", 1, base=0, last=True)
    shell.do(Drained(now=shell.now, learner="east", generation=1))
    assert shell.stage == "SEALED"


def test_a_run_whose_learners_are_all_gone_waits_for_them_until_the_deadline() -> None:
    shell = draining()
    shell.pass_time(20)
    assert not shell.state.active
    assert not finishes(shell)
    shell.pass_time(15)
    assert finishes(shell)


def test_a_run_whose_learners_have_left_ends_at_once() -> None:
    shell = draining()
    for learner in RULES.learners:
        assert not finishes(shell)
        shell.do(Leave(now=shell.now, learner=learner, generation=1))
    assert finishes(shell)


def test_draining_outlives_the_syncer() -> None:
    shell = draining()
    for learner in ("east", "west"):
        shell.do(Drained(now=shell.now, learner=learner, generation=1))
    shell.restart()
    shell.effects.clear()
    shell.do(Drained(now=shell.now, learner="north", generation=1))
    assert finishes(shell)
    shell.restart()  # before HEAD says that the run is final
    shell.effects.clear()
    shell.pass_time(1)
    assert finishes(shell)
    shell.finish()
    shell.restart()
    assert (shell.state.ledger.final, shell.state.rounds) == (True, ())
