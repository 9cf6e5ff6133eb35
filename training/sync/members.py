"""State of the run as the syncer sees it: members, the open round of each fragment, the ledger. Pure values;
`training.sync.machine` moves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec.structs import replace as change

from training.sync.messages import FragmentRecord, Ledger, MemberRecord, PlaceRecord

MemberState = Literal["active", "suspect", "dead", "left", "quarantined"]
Stage = Literal["OPEN", "SEALED", "MERGED", "DURABLE"]
DEAD_AFTER_LEASES = 3
"""A learner is not waited for after one lease; after so many its generation is fenced."""
OPENINGS = 16
"""Rounds back whose opening is known."""
PATIENCE_SHARE = 0.8
"""Of the time that learners wait for their round: what it may wait for others, unless the plan says more."""
MISTAKES = 3
"""Invalid contributions in a row that quarantine a learner."""
SOFT_STALENESS = 2
"""Merges per active learner since its base after which a contribution begins to count for less."""
MOST_STALENESS = 8
"""Merges per active learner since its base after which a contribution comes too late."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the plan says."""

    run: str
    contract: str
    learners: tuple[str, ...]
    target_samples: int
    mode: Literal["barrier", "decoupled"] = "barrier"
    fragments: int = 1
    inner_steps: int = 100
    quorum: int | None = None
    grace_share: float = 0.5
    round_deadline: float = 120.0
    lease: float = 20.0
    barrier_timeout: float = 600.0
    """After which a learner that waits for its round ends."""
    norm_factor: float = 10.0
    """A displacement longer than so many times the longest of the last ones is invalid."""
    norm_history: int = 32
    norm_minimum: int = 6
    """Accepted displacements before that means anything."""

    @property
    def home(self) -> str:
        """The learner that seeds version 0."""
        return self.learners[0]

    @property
    def decoupled(self) -> bool:
        return self.mode == "decoupled"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One learner: what is durable of it, and what its heartbeats said."""

    record: MemberRecord
    state: MemberState
    heard: float
    step: int = 0
    pending: int = 0
    kept: int = 0
    """Samples that it has trained and that are merged or will be, in the fragment that has the fewest."""
    step_seconds: float = 0.0
    in_flight_steps: int = 0
    blocked_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    measures: Mapping[str, float] = field(default_factory=dict[str, float])

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
    steps: int
    samples: int
    cursor: int
    base_version: int
    discarded_samples: int
    norm: float
    last: bool
    when: float
    loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """What makes version `number` of a fragment: a round (barrier) or a window (decoupled)."""

    fragment: int
    number: int
    opened: float
    stage: Stage = "OPEN"
    members: frozenset[tuple[str, int]] = frozenset()
    """Barrier: (learner, generation) that are waited for; fixed by the first arrival."""
    expected: frozenset[str] = frozenset()
    """First round of a barrier run: learners of the plan that have not shown up yet are waited for as well."""
    arrivals: Mapping[str, Arrival] = field(default_factory=dict[str, Arrival])
    deadline: float | None = None
    """When it closes with a quorum."""
    quorum_at: float | None = None
    """When the quorum was reached."""
    attempt: int = 1
    openings: tuple[float, ...] = ()
    """When the rounds before it opened, the last few that this process has seen."""
    sealed: float | None = None
    active: int = 0
    """Active learners when it was sealed."""

    @property
    def first_arrival(self) -> float | None:
        return min((one.when for one in self.arrivals.values()), default=None)

    @property
    def waited_in_vain(self) -> float:
        """Seconds from the last arrival to the seal."""
        last = max((one.when for one in self.arrivals.values()), default=None)
        return 0.0 if last is None or self.sealed is None else self.sealed - last

    @property
    def grace(self) -> float:
        """Seconds for which a sealed window waited for more than its quorum."""
        return 0.0 if self.quorum_at is None or self.sealed is None else self.sealed - self.quorum_at

    @property
    def share(self) -> float:
        """Of a full round that the window is, once it is sealed."""
        return len(self.arrivals) / max(self.active, len(self.arrivals))

    @property
    def only_last(self) -> bool:
        """Everybody who is here has sent the last contribution of a run that drains."""
        return bool(self.arrivals) and all(one.last for one in self.arrivals.values())

    def staleness(self, learner: str) -> int:
        """Versions between a contribution's base and this merge."""
        return self.number - 1 - self.arrivals[learner].base_version


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything the machine knows. Arrays are the shell's business."""

    rules: Rules
    epoch: int
    ledger: Ledger
    """Durable part besides the members."""
    members: Mapping[str, Member] = field(default_factory=dict[str, Member])
    rounds: tuple[Round, ...] = ()
    """The open round of each fragment; none before version 0 and after the final one."""
    ticked: float = 0.0
    drain_until: float | None = None
    """When a run that drains ends whoever is missing."""
    finishing: bool = False
    """It has drained; its model is being published."""

    @property
    def version(self) -> int:
        """Merges so far, over all fragments."""
        return self.ledger.version

    @property
    def versions(self) -> list[int]:
        """Of each fragment."""
        return [one.version for one in self.ledger.fragments]

    @property
    def active(self) -> list[Member]:
        """Members that are waited for, by name."""
        return [self.members[name] for name in sorted(self.members) if self.members[name].state == "active"]

    @property
    def remaining(self) -> int:
        """Samples that are still to be trained. What a learner that lives has trained counts before it is merged; if
        it is lost, it is to be trained again.
        """
        trained = sum(
            max(one.record.merged_samples, one.kept if one.state == "active" else 0) for one in self.members.values()
        )
        return max(0, self.rules.target_samples - trained)

    @property
    def quorum(self) -> int:
        """Contributions that suffice: at the deadline (barrier), or to merge after the grace (decoupled)."""
        active = max(1, len(self.active))
        if self.rules.decoupled:
            return min(self.rules.quorum or 1, active)
        return self.rules.quorum or math.ceil(active / 2)

    def may_be_merged(self, learner: str, fragment: int, contribution: tuple[int, int]) -> bool:
        """Whether a contribution, as (generation, seq), is accepted or could still be."""
        current, member = self.round(fragment), self.members.get(learner)
        arrival = current.arrivals.get(learner) if current else None
        if arrival is not None and (arrival.generation, arrival.seq) == contribution:
            return True
        if member is None or member.generation != contribution[0]:
            return False
        return member.state in {"active", "suspect"}

    def waiting_for(self, fragment: int = 0) -> list[str]:
        """Learners that the fragment's open round still waits for."""
        current = self.round(fragment)
        if current is None or current.stage != "OPEN":
            return []
        if self.rules.decoupled:
            wanted = {one.learner for one in self.active if self._may_send(one, fragment)}
            return sorted(wanted - set(current.arrivals)) if current.arrivals else []
        present = {one.learner for one in self.active if (one.learner, one.generation) in current.members}
        return sorted((present | (current.expected - set(self.members))) - set(current.arrivals))

    def _may_send(self, member: Member, fragment: int) -> bool:
        """In a decoupled run: it trains or has something pending; in one that drains, until it says that it has not."""
        if self.ledger.draining or self.remaining > 0:
            return fragment not in member.record.drained
        return member.kept > member.record.places[fragment].merged_samples

    def round(self, fragment: int = 0) -> Round | None:
        """The open round of a fragment."""
        return self.rounds[fragment] if self.rounds else None

    def put_round(self, current: Round) -> State:
        """The state with one fragment's round changed."""
        rounds = (*self.rounds[: current.fragment], current, *self.rounds[current.fragment + 1 :])
        return replace(self, rounds=rounds)

    def put_fragment(self, fragment: int, record: FragmentRecord) -> State:
        """The state with one fragment's durable record changed."""
        records = [*self.ledger.fragments[:fragment], record, *self.ledger.fragments[fragment + 1 :]]
        return replace(self, ledger=change(self.ledger, fragments=records))

    def durable(self) -> Ledger:
        """What has to survive this process."""
        return change(self.ledger, members=[self.members[name].record for name in sorted(self.members)])

    def put(self, member: Member) -> State:
        """The state with one member changed."""
        return replace(self, members={**self.members, member.learner: member})


def new_member(learner: str, *, fragments: int) -> MemberRecord:
    """A learner that was never heard of."""
    return MemberRecord(learner=learner, places=[PlaceRecord() for _ in range(fragments)])


def put_place(record: MemberRecord, fragment: int, place: PlaceRecord) -> MemberRecord:
    """The record with one fragment's place changed."""
    return change(record, places=[*record.places[:fragment], place, *record.places[fragment + 1 :]])


def recover(rules: Rules, ledger: Ledger, *, epoch: int, now: float) -> State:
    """The state of a syncer that starts: known learners count as alive for one lease, open rounds start over."""
    members = {
        one.learner: Member(record=one, state=_state_after_restart(one), heard=now)
        for one in ledger.members
        if one.generation
    }
    fragments = ledger.fragments or [FragmentRecord() for _ in range(rules.fragments)]
    ledger = change(ledger, members=[], fragments=fragments)
    state = State(rules=rules, epoch=epoch, ledger=ledger, members=members, ticked=now)
    if state.version < 0 or ledger.final:
        return state
    if ledger.draining:
        state = replace(state, drain_until=now + longest_patience(state))
    return open_all(state, now=now)


def open_all(state: State, *, now: float) -> State:
    """A new round of every fragment."""
    return replace(state, rounds=tuple(open_round(state, one, now=now) for one in range(state.rules.fragments)))


def open_round(state: State, fragment: int, *, now: float) -> Round:
    """A new round of a fragment with everybody who is active now."""
    number = state.ledger.fragments[fragment].version + 1
    expected = frozenset(state.rules.learners) if number == 1 else frozenset[str]()
    members = frozenset((one.learner, one.generation) for one in state.active)
    return Round(fragment=fragment, number=number, opened=now, members=members, expected=expected)


def patience(state: State, fragment: int) -> float:
    """Longest time that a round waits after its first arrival. It ends while those who came still wait for it."""
    rules = state.rules
    usual = min(3 * state.ledger.fragments[fragment].round_seconds, PATIENCE_SHARE * rules.barrier_timeout)
    return max(rules.round_deadline, usual)


def longest_patience(state: State) -> float:
    """Longest time that any fragment's round waits."""
    return max(patience(state, one) for one in range(state.rules.fragments))


def grace(state: State, fragment: int) -> float:
    """How long a window with its quorum waits for more: a share of the slack of half a round of the fastest learner,
    after what quorum and sync usually take (cross-region.md 1.5). Zero while no pace is known.
    """
    record = state.ledger.fragments[fragment]
    pace = min((one.step_seconds for one in state.active if one.step_seconds > 0), default=0.0)
    slack = state.rules.inner_steps / 2 * pace - record.quorum_seconds - record.sync_seconds
    return state.rules.grace_share * max(0.0, slack)


def _state_after_restart(record: MemberRecord) -> MemberState:
    if record.left:
        return "left"
    return "quarantined" if record.invalid_in_row >= MISTAKES else "active"
