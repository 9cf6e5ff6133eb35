"""State of the run as the syncer sees it: members, the open round, the ledger. Pure values; `training.sync.machine`
moves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec.structs import replace as change

from training.sync.messages import Ledger, MemberRecord

MemberState = Literal["active", "suspect", "dead", "left", "quarantined"]
Stage = Literal["OPEN", "SEALED", "MERGED", "DURABLE"]
DEAD_AFTER_LEASES = 3
"""A learner is not waited for after one lease; after so many its generation is fenced."""
MISTAKES = 3
"""Invalid contributions in a row that quarantine a learner."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the plan says."""

    run: str
    contract: str
    learners: tuple[str, ...]
    target_samples: int
    quorum: int | None = None
    round_deadline: float = 120.0
    lease: float = 20.0
    norm_factor: float = 10.0
    """A displacement longer than so many times the running median is invalid."""
    norm_history: int = 32
    norm_minimum: int = 6
    """Accepted displacements before the median means anything."""

    @property
    def home(self) -> str:
        """The learner that seeds version 0."""
        return self.learners[0]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One learner: what is durable of it, and what its heartbeats said."""

    record: MemberRecord
    state: MemberState
    heard: float
    step: int = 0
    pending: int = 0
    step_seconds: float = 0.0

    @property
    def learner(self) -> str:
        return self.record.learner

    @property
    def generation(self) -> int:
        return self.record.generation


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """An accepted contribution; it counts whatever becomes of its sender."""

    learner: str
    generation: int
    seq: int
    digest: str
    samples: int
    cursor: int
    base_version: int
    discarded_samples: int
    norm: float
    when: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """The round that makes version `number`."""

    number: int
    opened: float
    stage: Stage = "OPEN"
    members: frozenset[tuple[str, int]] = frozenset()
    """(learner, generation) that are waited for; fixed by the first arrival."""
    expected: frozenset[str] = frozenset()
    """First round only: learners of the plan that have not shown up yet are waited for as well."""
    arrivals: Mapping[str, Arrival] = field(default_factory=dict[str, Arrival])
    deadline: float | None = None
    attempt: int = 1

    @property
    def first_arrival(self) -> float | None:
        return min((one.when for one in self.arrivals.values()), default=None)


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything the machine knows. Arrays are the shell's business."""

    rules: Rules
    epoch: int
    ledger: Ledger
    """Durable part besides the members."""
    members: Mapping[str, Member] = field(default_factory=dict[str, Member])
    round: Round | None = None
    ticked: float = 0.0

    @property
    def version(self) -> int:
        return self.ledger.version

    @property
    def active(self) -> list[Member]:
        """Members that are waited for, by name."""
        return [self.members[name] for name in sorted(self.members) if self.members[name].state == "active"]

    @property
    def quorum(self) -> int:
        """Contributions that suffice at the deadline."""
        return self.rules.quorum or max(1, math.ceil(len(self.active) / 2))

    @property
    def waiting_for(self) -> list[str]:
        """Learners that the open round still waits for."""
        if self.round is None or self.round.stage != "OPEN":
            return []
        present = {one.learner for one in self.active if (one.learner, one.generation) in self.round.members}
        return sorted((present | (self.round.expected - set(self.members))) - set(self.round.arrivals))

    def durable(self) -> Ledger:
        """What has to survive this process."""
        records = [self.members[name].record for name in sorted(self.members)]
        return _with_members(self.ledger, records)

    def put(self, member: Member) -> State:
        """The state with one member changed."""
        return replace(self, members={**self.members, member.learner: member})


def recover(rules: Rules, ledger: Ledger, *, epoch: int, now: float) -> State:
    """The state of a syncer that starts: known learners count as alive for one lease, the open round starts over."""
    members = {
        one.learner: Member(record=one, state=_state_after_restart(one), heard=now)
        for one in ledger.members
        if one.generation
    }
    state = State(rules=rules, epoch=epoch, ledger=_with_members(ledger, []), members=members, ticked=now)
    return state if state.version < 0 or ledger.final else replace(state, round=open_round(state, now=now))


def open_round(state: State, *, now: float) -> Round:
    """A new round with everybody who is active now."""
    number = state.version + 1
    expected = frozenset(state.rules.learners) if number == 1 else frozenset[str]()
    members = frozenset((one.learner, one.generation) for one in state.active)
    return Round(number=number, opened=now, members=members, expected=expected)


def _state_after_restart(record: MemberRecord) -> MemberState:
    if record.left:
        return "left"
    return "quarantined" if record.invalid_in_row >= MISTAKES else "active"


def _with_members(ledger: Ledger, members: list[MemberRecord]) -> Ledger:
    return change(ledger, members=members)
