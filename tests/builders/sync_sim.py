"""Simulated learners and syncer on one event clock: the production merge, outer optimizer, codecs, rounds and adoption
rules, without processes, sockets or machines that fail. Time is counted in steps of the fastest learner.

What is simulated is only the passing of time. One contribution of a fragment is in flight at a time; a window opens
with its first arrival and closes when all are in or its grace is over; at the end everything is drained.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from training.sync.adopt import FragmentState, LearnerSyncState, apply_action, decide
from training.sync.codec import Codec, encode
from training.sync.layout import Floats, Layout
from training.sync.members import SOFT_STALENESS, Arrival, Round
from training.sync.merge import Displacement, MergeRules, merge
from training.sync.messages import Verdict
from training.sync.outer import OuterState
from training.sync.pieces import Part, Parts

FOREVER = float("inf")


class Inner(Protocol):
    """A learner's own training, with its optimizer's state and its data."""

    def step(self, theta: Floats, progress: float) -> Floats:
        """The weights after one inner step; `progress` of the whole budget, from 0 to 1, drives the schedule."""
        ...


@dataclass(frozen=True, kw_only=True)
class World:
    """What is simulated."""

    mode: Literal["barrier", "decoupled"] = "barrier"
    inner_steps: int = 20
    steps: int = 800
    """Per learner; uneven learners share the sum."""
    learning_rate: float = 0.7
    momentum: float = 0.7
    adopt: Literal["rebase", "overwrite"] = "rebase"
    codec: Codec = "fp32"
    fragments: int = 1
    step_times: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    """One per learner."""
    latency: float = 0.0
    """One way."""
    grace: float = 0.0
    """How long a window stays open after its first arrival; `FOREVER`: until all are in."""
    momentum_per_contribution: bool = False
    """Every window counts as a full round: the mistake that delayed Nesterov avoids."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A fragment's outer state after a merge."""

    fragment: int
    version: int
    learners: tuple[str, ...]
    outer: OuterState


@dataclass(kw_only=True)
class Outcome:
    """What came of it."""

    theta: Floats
    moments: list[Moment] = field(default_factory=list[Moment])
    staleness: list[int] = field(default_factory=list[int])
    bytes_sent: int = 0
    lost_steps: int = 0
    """Made, and in no merge."""
    learners: list[Floats] = field(default_factory=list[Floats])
    """Weights of each learner at the end."""


def simulate(start: Floats, inners: Sequence[Inner], world: World) -> Outcome:
    """Run until the budget is spent and everything is merged."""
    return _Simulation(start, inners, world).run()


@dataclass(kw_only=True)
class _Learner:
    name: str
    inner: Inner
    step_time: float
    theta: Floats
    anchors: list[Floats]
    snapshots: list[Floats]
    state: LearnerSyncState
    inbox: list[tuple[int, Verdict, Floats]] = field(default_factory=list[tuple[int, Verdict, Floats]])


class _Simulation:
    def __init__(self, start: Floats, inners: Sequence[Inner], world: World) -> None:
        self.world, self.now = world, 0.0
        self.layout = Layout.from_shapes({"weights": [len(start)]}, fragments=world.fragments)
        self.places = [slice(a, a + n) for a, n in map(self.layout.fragment_range, range(world.fragments))]
        self.outers = [OuterState.start(start[place].copy()) for place in self.places]
        self.versions = [0] * world.fragments
        self.windows: list[dict[str, tuple[Arrival, Parts]]] = [{} for _ in self.places]
        self.learners = [
            _Learner(
                name=f"learner-{number:02d}",
                inner=inner,
                step_time=step_time,
                theta=start.copy(),
                anchors=[start[place].copy() for place in self.places],
                snapshots=[start[place].copy() for place in self.places],
                state=LearnerSyncState(fragments=(FragmentState(base_version=0),) * world.fragments).spread(
                    inner_steps=world.inner_steps
                ),
            )
            for number, (inner, step_time) in enumerate(zip(inners, world.step_times, strict=True))
        ]
        self.budget = world.steps * len(self.learners)
        self.done = 0
        self.outcome = Outcome(theta=start)
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> Outcome:
        for learner in self.learners:
            self._at(learner.step_time, lambda learner=learner: self._step(learner), after_messages=True)
        self._run_queue()
        for fragment in range(self.world.fragments):
            self._merge(fragment)
        self._run_queue()
        self._drain()
        self.outcome.theta = np.concatenate([outer.theta for outer in self.outers])
        self.outcome.learners = [one.theta for one in self.learners]
        return self.outcome

    def _at(self, when: float, action: Callable[[], None], *, after_messages: bool = False) -> None:
        """Of what happens at the same time, messages come before steps."""
        heapq.heappush(self._queue, (when, int(after_messages), next(self._order), action))

    def _run_queue(self) -> None:
        while self._queue:
            self.now, _, _, action = heapq.heappop(self._queue)
            action()

    def _step(self, learner: _Learner) -> None:
        self._adopt(learner)
        blocked = self.world.mode == "barrier" and learner.state.in_flight
        if self.done >= self.budget:
            return
        if not blocked:
            learner.theta = learner.inner.step(learner.theta, self.done / self.budget)
            self.done += 1
            learner.state = learner.state.ran(1)
            fragment = learner.state.due()
            if fragment is not None:
                self._send(learner, fragment)
        self._at(self.now + learner.step_time, lambda: self._step(learner), after_messages=True)

    def _send(self, learner: _Learner, fragment: int) -> None:
        before = learner.state.fragments[fragment]
        learner.state = learner.state.change(fragment, before.snapshot(inner_steps=self.world.inner_steps))
        place = self.places[fragment]
        learner.snapshots[fragment] = learner.theta[place].copy()
        wire = encode(learner.theta[place] - learner.anchors[fragment], self.world.codec)
        self.outcome.bytes_sent += wire.nbytes
        interval = (place.start, place.stop - place.start)
        part = Part(data=wire.copy(), ranges=[interval], codec=self.world.codec)
        parts = Parts([part], start=interval[0], length=interval[1])
        arrival = Arrival(
            learner=learner.name,
            generation=1,
            seq=before.seq + 1,
            digest="",
            steps=before.pending_steps,
            samples=before.pending_samples,
            cursor=before.cursor,
            base_version=before.base_version,
            discarded_samples=before.discarded_samples,
            norm=0.0,
            last=False,
            when=self.now,
        )
        self._at(self.now + self.world.latency, lambda: self._arrive(fragment, arrival, parts))

    def _arrive(self, fragment: int, arrival: Arrival, parts: Parts) -> None:
        window = self.windows[fragment]
        window[arrival.learner] = (arrival, parts)
        wait = FOREVER if self.world.mode == "barrier" else self.world.grace
        if len(window) == len(self.learners) or wait <= 0:
            self._merge(fragment)
        elif len(window) == 1 and wait < FOREVER:
            version = self.versions[fragment]
            self._at(self.now + wait, lambda: self._merge(fragment) if self.versions[fragment] == version else None)

    def _merge(self, fragment: int) -> None:
        window, self.windows[fragment] = self.windows[fragment], {}
        if not window:
            return
        self.versions[fragment] += 1
        active = len(self.learners)
        sealed = Round(
            fragment=fragment,
            number=self.versions[fragment],
            opened=self.now,
            arrivals={name: arrival for name, (arrival, _) in window.items()},
            active=active,
        )
        displacements = [
            Displacement(learner=name, delta=parts, samples=arrival.samples, staleness=sealed.staleness(name))
            for name, (arrival, parts) in window.items()
        ]
        self.outcome.staleness += [one.staleness for one in displacements]
        rules = MergeRules(
            learning_rate=self.world.learning_rate,
            momentum=self.world.momentum,
            round_samples=self.world.inner_steps,
            soft_staleness=SOFT_STALENESS * active,
        )
        whole = self.world.mode == "barrier" or self.world.momentum_per_contribution
        self.outers[fragment] = merge(
            self.outers[fragment], displacements, rules=rules, frac=1.0 if whole else sealed.share, threads=1
        ).outer
        moment = Moment(
            fragment=fragment,
            version=sealed.number,
            learners=tuple(sorted(window)),
            outer=self.outers[fragment],
        )
        self.outcome.moments.append(moment)
        for learner in self.learners:
            if learner.name in window:
                self._at(self.now + self.world.latency, lambda learner=learner: self._answer(learner, moment))

    def _answer(self, learner: _Learner, moment: Moment) -> None:
        verdict = Verdict(
            kind="merged",
            version=moment.version,
            samples_total=self.done,
            final=False,
            theta_sha256="",
            fragment=moment.fragment,
            round=moment.version,
        )
        learner.inbox.append((moment.fragment, verdict, moment.outer.theta))

    def _adopt(self, learner: _Learner) -> None:
        for fragment, verdict, shared in learner.inbox:
            state, action = decide(
                learner.state.fragments[fragment],
                verdict=verdict,
                pending_limit=2 * self.world.inner_steps,
                mode=self.world.adopt,
            )
            place = self.places[fragment]
            learner.theta[place], learner.anchors[fragment] = apply_action(
                learner.theta[place],
                action=action,
                anchor=learner.anchors[fragment],
                shared=shared,
                snapshot=learner.snapshots[fragment],
            )
            learner.state = learner.state.change(fragment, state)
        learner.inbox.clear()

    def _drain(self) -> None:
        """Everything that is in flight was answered: one last contribution of what is pending, one last window each."""
        last = replace(self.world, grace=FOREVER)
        self.world = last
        for learner in self.learners:
            self._adopt(learner)
            for fragment, state in enumerate(learner.state.fragments):
                if state.pending_steps:
                    self._send(learner, fragment)
        self._run_queue()
        for fragment in range(last.fragments):
            self._merge(fragment)
        self._run_queue()
        for learner in self.learners:
            self._adopt(learner)
            self.outcome.lost_steps += max(one.discarded_samples for one in learner.state.fragments)
            for fragment, outer in enumerate(self.outers):  # the final weights are taken as they are
                learner.theta[self.places[fragment]] = outer.theta
