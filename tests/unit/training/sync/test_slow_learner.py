"""A barrier of a fast and a slow learner: the pure rules of both sides, played against each other in simulated time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from tests.builders.sync_machine import Shell
from training.sync.adopt import FragmentState, LearnerSyncState, decide
from training.sync.events import Answer
from training.sync.members import Rules
from training.sync.messages import Verdict

STEPS, BATCH = 10, 10
RULES = Rules(run="r1", contract="c", learners=("east", "west"), target_samples=10**9, round_deadline=120, lease=20)


@dataclass
class Learner:
    """Keeps the protocol as `training.rounds` does."""

    name: str
    step_seconds: float
    state: LearnerSyncState
    next_step: float
    waits: bool = False

    def train(self, now: float) -> None:
        if not self.waits and now >= self.next_step:
            self.state, self.next_step = self.state.ran(BATCH), self.next_step + self.step_seconds
            self.send_if_due()

    def send_if_due(self) -> None:
        if self.state.due() is not None:
            self.state = self.state.change(0, self.state.fragments[0].snapshot(inner_steps=STEPS))
            self.waits = True

    def hear(self, shell: Shell) -> str:
        """Ask for the verdict, and do what it says; its kind, or nothing."""
        own = self.state.fragments[0]
        found = shell.send(
            self.name, own.seq, base=own.base_version, samples=own.pending_samples, cursor=own.cursor,
            discarded_samples=own.discarded_samples,
        )  # fmt: skip
        if not isinstance(found, Answer):
            return ""
        verdict = Verdict(
            kind=found.answered.kind, version=shell.state.version, samples_total=0, final=False, theta_sha256=""
        )  # fmt: skip
        settled, action = decide(own, verdict=verdict, pending_limit=2 * STEPS * BATCH)
        self.state, self.waits, self.next_step = self.state.change(0, settled), False, shell.now + self.step_seconds
        if (verdict.kind, action) == ("late", "carry"):
            self.state = self.state.hurry()
            self.send_if_due()
        return verdict.kind


@pytest.mark.parametrize(("slower", "late", "merged"), [(2, 0, 9), (4, 1, 8), (5, 1, 8), (7, 4, 4)])
def test_a_slow_learner_is_waited_for_or_comes_every_second_time_and_loses_nothing(
    slower: float, late: int, merged: int
) -> None:
    """A round of east is 100 s. West is late once, and then waited for as long as the others can wait."""
    shell = Shell(RULES)
    learners = [
        Learner(
            name, seconds, LearnerSyncState(fragments=(FragmentState(base_version=0, steps_to_due=STEPS),)), seconds
        )
        for name, seconds in (("east", 10.0), ("west", 10.0 * slower))
    ]
    for one in learners:
        shell.register(one.name)
    shell.seed()
    kinds = Counter[str]()
    while shell.state.version < 10:
        assert shell.now < 20_000
        shell.pass_time(1, alive=RULES.learners)
        for one in learners:
            one.train(shell.now)
            if one.waits and (kind := one.hear(shell)) and one.name == "west":
                kinds[kind] += 1
        if shell.stage == "SEALED":
            shell.merge()
    west = learners[1].state.fragments[0]
    assert west.discarded_samples == 0
    assert (kinds["late"], kinds["merged"]) == (late, merged)
