"""How long a round between learners and syncer takes: a model of its stages, and a simulation of many rounds in which
learners share the syncer's network and its one worker.

Bytes and rates decide; what a stage costs on one core is measured by `benchmarks.sync_scale`. Left out: packet loss
and the growth of TCP windows, which a long link needs tuned.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from training.sync.chunks import CHUNK_BYTES
from training.sync.codec import Codec, encoded_bytes

FOREVER = float("inf")
ROUND_TRIPS = 4
"""Of a round besides the chunks': open, close, commit, verdict."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one core does, in bytes per second unless it says elements; all measured."""

    cores: int
    encode: dict[Codec, float]
    """Elements."""
    look: dict[Codec, float]
    """Elements that are decoded and whose norm is taken."""
    merge: float
    """Elements of four contributions and the outer state."""
    average: float
    """Elements of four learners' averaged weights."""
    digest: float
    """sha256."""
    wire: float
    """Through both ends of a connection, with all checks but the sender's digest."""
    fresh: float
    """Of memory that is written for the first time."""
    disk: float
    """Of a new file, written and flushed."""
    copy: float
    """Elements copied on the learner's side."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One experiment."""

    learners: int
    parameters: int
    link: float
    """Bits per second of one learner."""
    round_trip: float
    mode: Literal["barrier", "decoupled"] = "barrier"
    codec: Codec = "bf16"
    ema: bool = True
    """Averaged weights travel with each contribution."""
    inner_steps: int = 100
    step_seconds: float = 1.0
    ranks: int = 8
    connections: int = 4
    syncer_network: float = 100e9
    parts: int = 1
    """Syncers that share the fragments, each on a machine of its own."""
    max_ahead: int = 4
    grace_share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds of each stage of one contribution and one merge, when nobody else is in the way."""

    snapshot: float
    """The training thread copies its ranges."""
    prepare: float
    """Encode and hash, in the background."""
    bytes_up: int
    bytes_down: int
    pace_up: float
    """Bytes per second that the learner's link carries, with a round trip for each chunk."""
    pace_down: float
    accept: float
    merge: float
    commit: float
    """Digest and write state, weights and model."""
    talk: float
    """Round trips that carry no weights."""

    @property
    def round(self) -> float:
        """A whole round, undisturbed."""
        flows = self.bytes_up / self.pace_up + self.bytes_down / self.pace_down
        return self.snapshot + self.prepare + flows + self.accept + self.merge + self.commit + self.talk


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the simulation of a case saw."""

    round_seconds: float
    """From one contribution of a learner to its next."""
    sync_seconds: float
    """From a contribution's snapshot to its answer in the weights."""
    blocked_share: float
    """Of a learner's time."""
    busy_share: float
    """Of the syncer's worker."""
    merges: int
    network: float
    """Bits per second through the syncer, both directions, on average."""


def stages(case: Case, machine: Machine) -> Stages:
    """Stage by stage. A learner's ranks work side by side, each with a core of its own."""
    count, per_rank = case.parameters, case.parameters / case.ranks
    vectors = 2 if case.ema else 1
    up, down = vectors * encoded_bytes(count, case.codec), 4 * count
    share, here = min(1.0, machine.cores / case.learners), count / case.parts
    return Stages(
        snapshot=vectors * per_rank / machine.copy,
        prepare=vectors * per_rank / machine.encode[case.codec] + up / case.ranks / machine.digest,
        bytes_up=up,
        bytes_down=down,
        pace_up=_pace(case, up),
        pace_down=_pace(case, down),
        accept=vectors * here * (1 / machine.look[case.codec] + 4 / machine.fresh) / share,
        merge=(here / machine.merge + (here / machine.average if case.ema else 0)) * case.learners / 4
        + 4 * here / machine.fresh,
        commit=(4 + 16 + 4) * here / machine.digest + (16 + 4) * here / machine.disk,
        talk=ROUND_TRIPS * case.round_trip,
    )


def hold(case: Case) -> tuple[int, int]:
    """Bytes that all parts of the syncer together must hold, and their peak while they merge and write."""
    state = 16 * case.parameters  # weights, momentum, accumulator, averaged weights
    received = case.learners * (2 if case.ema else 1) * 4 * case.parameters  # decoded where it arrives
    fresh = 16 * case.parameters if case.ema else 12 * case.parameters
    return state + received, state + received + fresh


def divide(case: Case, machine: Machine, *, busy: float) -> int:
    """Parts of the syncer that keep the worker of each busy for no more than that share of the training time."""
    work = stages(case, machine)
    merges = case.learners if case.mode == "decoupled" else 1  # at most: each contribution a merge of its own
    return max(1, math.ceil((work.merge + merges * work.commit) / (busy * case.inner_steps * case.step_seconds)))


def simulate(case: Case, machine: Machine, *, rounds: int = 8) -> Forecast:
    """Learners that share the syncer: in barrier mode in step, in decoupled mode evenly apart."""
    return _Simulation(case, machine, rounds=rounds).run()


def _pace(case: Case, size: float) -> float:
    """Each connection asks for one chunk after the other and waits a round trip for each."""
    chunk = min(CHUNK_BYTES, size / case.ranks)
    waiting = case.round_trip / (chunk * case.ranks * min(case.connections, max(1, size / case.ranks / chunk)))
    return 1 / (8 / case.link + waiting)


@dataclass(kw_only=True)
class _Flow:
    remaining: float
    most: float
    then: Callable[[], None]


@dataclass(kw_only=True)
class _Learner:
    sent: float = 0.0
    rounds: list[float] = field(default_factory=list[float])
    syncs: list[float] = field(default_factory=list[float])
    blocked: float = 0.0
    ended: float = 0.0


class _Simulation:
    def __init__(self, case: Case, machine: Machine, *, rounds: int) -> None:
        self._case, self._machine, self._rounds = case, machine, rounds
        self._stages = stages(case, machine)
        self._train = case.inner_steps * case.step_seconds
        self._now, self._busy, self._merges, self._moved = 0.0, 0.0, 0, 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._flows: dict[str, list[_Flow]] = {"up": [], "down": []}
        self._learners = [_Learner() for _ in range(case.learners)]
        self._window: list[_Learner] = []
        self._merging = False
        # What `machine.py` waits for more contributions: a share of what half a round leaves.
        self._grace = case.grace_share * max(0.0, self._train / 2 - self._stages.round)

    def run(self) -> Forecast:
        spread = self._train / self._case.learners if self._case.mode == "decoupled" else 0.0
        for number, learner in enumerate(self._learners):
            self._after(self._train + number * spread, lambda one=learner: self._send(one))
        while self._timers or any(self._flows.values()):
            self._advance()
        return self._summary()

    def _summary(self) -> Forecast:
        rounds = [one for learner in self._learners for one in learner.rounds]
        syncs = [one for learner in self._learners for one in learner.syncs]
        return Forecast(
            round_seconds=sum(rounds) / len(rounds),
            sync_seconds=sum(syncs) / len(syncs),
            blocked_share=sum(one.blocked for one in self._learners) / sum(one.ended for one in self._learners),
            busy_share=self._busy / self._now,
            merges=self._merges,
            network=8 * self._moved / self._now,
        )

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._now + seconds, next(self._order), action))

    def _advance(self) -> None:
        """To the next timer or end of a flow, whichever comes first."""
        total = self._case.parts * min(self._case.syncer_network / 8, self._machine.wire * self._machine.cores)
        paced = [(flow, min(flow.most, total / len(flows))) for flows in self._flows.values() for flow in flows]
        ends = min((flow.remaining / rate for flow, rate in paced), default=FOREVER)
        due = self._timers[0][0] - self._now if self._timers else FOREVER
        passed = min(ends, due)
        self._now += passed
        for flow, rate in paced:
            flow.remaining -= rate * passed
            self._moved += rate * passed
        if due <= ends:
            heapq.heappop(self._timers)[2]()
            return
        for flows in self._flows.values():
            for flow in [one for one in flows if one.remaining <= 1e-6 * one.most]:
                flows.remove(flow)
                flow.then()

    def _send(self, learner: _Learner) -> None:
        if learner.sent:
            learner.rounds.append(self._now - learner.sent)
        learner.sent, plan = self._now, self._stages
        flow = _Flow(remaining=plan.bytes_up, most=plan.pace_up, then=lambda: self._after(plan.accept, arrive))
        self._after(plan.snapshot + plan.prepare + plan.talk / 2, lambda: self._flows["up"].append(flow))

        def arrive() -> None:
            self._window.append(learner)
            self._look(opens=len(self._window) == 1)

    def _look(self, *, opens: bool) -> None:
        """Seal the window when all are in, or start its grace when it opens."""
        if self._merging or not self._window:
            return
        if len(self._window) == self._case.learners:
            self._merge()
        elif opens and self._case.mode == "decoupled":
            merges = self._merges
            self._after(self._grace, lambda: self._merge() if self._merges == merges else None)

    def _merge(self) -> None:
        taken, self._window, self._merging = self._window, [], True
        self._merges += 1
        plan = self._stages
        seconds = plan.merge * len(taken) / self._case.learners + plan.commit
        self._busy += seconds

        def publish() -> None:
            self._merging = False
            for learner in taken:
                flow = _Flow(remaining=plan.bytes_down, most=plan.pace_down, then=lambda one=learner: self._adopt(one))
                self._after(plan.talk / 2, lambda flow=flow: self._flows["down"].append(flow))
            self._look(opens=True)

        self._after(seconds, publish)

    def _adopt(self, learner: _Learner) -> None:
        took = self._now - learner.sent
        learner.syncs.append(took)
        if self._case.mode == "barrier":
            learner.blocked += took
            pause = self._train
        else:
            ahead = (self._case.max_ahead - 1) * self._train
            learner.blocked += 2 * self._stages.snapshot + max(0.0, took - ahead)
            pause = max(0.0, self._train - took)
        learner.ended = self._now + pause
        if len(learner.syncs) <= self._rounds:
            self._after(pause, lambda: self._send(learner))
