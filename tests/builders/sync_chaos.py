"""A world of learners, a network and a syncer that dies, around the pure machine: everything random comes from one
generator, so a seed tells a whole story.

Learners keep the protocol (cross-region.md 8.6) and their own books; messages are delayed, repeated, reordered and
lost; processes are killed and come back from old checkpoints. What has to hold is checked at every step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.builders.sync_machine import Shell
from training.sync.events import Answer, Committed, Contributed, Drained, MergeDone, Published, Refuse, Seeded, Wait
from training.sync.members import Rules
from training.sync.messages import Answered

Key = tuple[str, int, int, int]
"""Learner, generation, fragment, sequence."""
BATCH = 10
ROUND = 40
"""Samples of one round of one learner."""


@dataclass
class Place:
    """A learner's books of one fragment."""

    base: int = -1
    seq: int = 0
    merged_seq: int = 0
    pending: int = 0
    told: int = 0
    """Samples that it was told are merged."""
    discarded: int = 0
    in_flight: Contributed | None = None


@dataclass
class Process:
    """One process of a learner, as far as sync goes."""

    generation: int
    places: list[Place]
    waiting: bool = False
    """An earlier process's contribution has to be answered first."""
    draining: bool = False
    drained: bool = False
    final: bool = False
    dead: bool = False


@dataclass
class Learner:
    name: str
    process: Process | None = None
    checkpoint: list[Place] | None = None
    run: int = 0
    """Samples executed, whatever became of them."""
    lost: list[int] = field(default_factory=list[int])
    books: list[Place] = field(default_factory=list[Place])
    """Of the process that died last."""


class World:
    """`act` does one random thing; `settle` lets everything come to its end."""

    def __init__(self, random: Random) -> None:
        self.random = random
        names = ("east", "north", "west")[: random.choice((1, 2, 3))]
        self.rules = Rules(
            run="r",
            contract="c",
            learners=names,
            target_samples=random.choice((200, 1000, 4000)),
            mode=random.choice(("barrier", "decoupled")),
            fragments=random.choice((1, 1, 2, 3)),
            inner_steps=4,
            quorum=random.choice((None, None, len(names))),
            round_deadline=10,
            lease=5,
            norm_minimum=4,
        )
        self.shell = Shell(self.rules)
        self.fragments = range(self.rules.fragments)
        self.learners = {name: Learner(name, lost=[0] * self.rules.fragments) for name in names}
        self.network: list[Contributed] = []
        self.seen: list[Contributed] = []
        """Delivered at least once."""
        self.merged: dict[Key, int] = {}
        self.verdicts: dict[Key, Answered] = {}
        self.arrived: dict[tuple[int, int], set[tuple[str, int, int]]] = {}
        """Accepted by the syncer that lives, by fragment and round."""
        self.sealed: set[tuple[int, int]] = set()
        self.versions = [-1] * self.rules.fragments
        self.fenced: set[tuple[str, int]] = set()
        self.calm = False
        self.join(self.learners[names[0]])
        self.shell.seed()

    # --- what can happen

    def act(self) -> None:
        """One random thing."""
        self.random.choices(_ACTIONS, _WEIGHTS)[0](self)
        self.check()

    def settle(self) -> None:
        """Nothing more goes wrong: the run has to come to its end, and all books have to agree."""
        self.calm = True
        for _ in range(1500):
            for learner in self.learners.values():
                if learner.process is None or learner.process.dead or learner.process.waiting:
                    self.join(learner)
                self.train(learner)
                self.contribute(learner)
            for message in list(self.network):
                self.deliver(message, lose=False)
            self.merge(crash=False)
            self.shell.pass_time(1, alive=[name for name, one in self.learners.items() if _lives(one)], step_seconds=1)
            self.check()
            if self.shell.state.ledger.final and all(_rests(one) for one in self.learners.values()):
                return self.audit()
        raise AssertionError(f"the run does not end: {self.shell.state}")

    def some_learner(self) -> Learner:
        return self.learners[self.random.choice(sorted(self.learners))]

    def do_train(self) -> None:
        self.train(self.some_learner())

    def do_contribute(self) -> None:
        self.contribute(self.some_learner())

    def do_deliver(self) -> None:
        if self.network:
            self.deliver(self.random.choice(self.network), lose=self.random.random() < 0.2)

    def do_replay(self) -> None:
        """A message that came before comes again, as it was or with other content."""
        if not self.seen:
            return
        message = self.random.choice(self.seen)
        if self.random.random() < 0.3:
            before = self.shell.state
            found = self.tell(replace(message, digest="other"))
            if isinstance(found, Refuse) or (isinstance(found, Answer) and found.answered.kind == "fenced"):
                # What was due after a restart may happen with the first event, whatever that is.
                assert replace(self.shell.state, finishing=before.finishing) == before
                return
            # The syncer that knew the first one is gone, and nothing was decided: this is the one that counts now.
            assert _key(message) not in self.verdicts
            self.network = [one for one in self.network if _key(one) != _key(message)]
            self.forget(message)
            return
        self.deliver(message, lose=True)

    def do_merge(self) -> None:
        self.merge(crash=self.random.random() < 0.2)

    def do_time(self) -> None:
        alive = [name for name, one in sorted(self.learners.items()) if _lives(one) and self.random.random() < 0.8]
        self.shell.pass_time(self.random.choice((1, 2, 7)), alive=alive, step_seconds=self.random.choice((0, 1, 3)))

    def do_kill_syncer(self) -> None:
        self.shell.restart()
        self.arrived.clear()
        self.sealed.clear()

    def do_kill_learner(self) -> None:
        learner = self.some_learner()
        if learner.process:
            learner.process.dead = True

    def do_join(self) -> None:
        self.join(self.some_learner())

    def do_checkpoint(self) -> None:
        learner = self.some_learner()
        if _lives(learner):
            assert learner.process
            learner.checkpoint = copy.deepcopy(learner.process.places)

    def do_seed(self) -> None:
        """A fresh process can never become the shared state."""
        before = self.shell.state
        prints = ("fresh",) * self.rules.fragments
        found = self.shell.do(Seeded(now=self.shell.now, seed_sha256="fresh", theta_sha256=prints, fingerprint="f"))
        assert isinstance(found[0], Refuse)
        assert self.shell.state == before

    # --- learners

    def train(self, learner: Learner) -> None:
        process = learner.process
        if not _lives(learner) or process is None or process.draining or process.final:
            return
        busy = any(one.in_flight for one in process.places)
        ahead = any(one.pending >= 4 * ROUND for one in process.places)
        if (busy and self.rules.mode == "barrier") or ahead:
            return
        learner.run += BATCH
        for place in process.places:
            place.pending += BATCH

    def contribute(self, learner: Learner) -> None:
        process = learner.process
        if not _lives(learner) or process is None or process.final:
            return
        for fragment, place in enumerate(process.places):
            if place.in_flight or place.pending < (1 if process.draining else ROUND):
                continue
            if self.rules.mode == "barrier" and place is not min(process.places, key=lambda one: one.base):
                continue  # who waits in a barrier waits in the same as everybody else
            place.seq += 1
            bad = not self.calm and self.random.random() < 0.03
            place.in_flight = Contributed(
                now=0,
                learner=learner.name,
                generation=process.generation,
                fragment=fragment,
                seq=place.seq,
                digest=f"{learner.name}/{process.generation}/{fragment}/{place.seq}",
                base_version=place.base + (5 if bad and self.random.random() < 0.5 else 0),
                samples=place.pending,
                cursor=learner.run,
                norm=self.random.uniform(1, 2) * (100 if bad else 1),
                discarded_samples=place.discarded,
                last=process.draining,
                problem="bad" if bad and self.random.random() < 0.3 else "",
            )
            self.network.append(place.in_flight)
        if process.draining and not process.drained and not any(one.pending for one in process.places):
            event = Drained(now=self.shell.now, learner=learner.name, generation=process.generation)
            process.drained = not any(isinstance(one, Refuse) for one in self.shell.do(event))

    def tell(self, message: Contributed) -> Any:
        """The syncer's answer."""
        effects = self.shell.do(replace(message, now=self.shell.now))
        return next((one for one in effects if isinstance(one, (Answer, Refuse, Wait))), Wait())

    def deliver(self, message: Contributed, *, lose: bool) -> None:
        """A message arrives; its answer may be lost, and then it is sent again."""
        self.seen = [*self.seen[-50:], message]
        found = self.tell(message)
        if isinstance(found, Answer):
            self.note(message, found.answered)
        ours = self.sender(message)
        if ours is None:
            self.network = [one for one in self.network if one is not message]
        elif isinstance(found, Answer) and not lose:
            self.network = [one for one in self.network if one is not message]
            self.take(message, found.answered, *ours)
        elif isinstance(found, Refuse) and found.reason == "unregistered":
            raise AssertionError("a registration was forgotten")

    def note(self, message: Contributed, answered: Answered) -> None:
        key = _key(message)
        if answered.kind == "fenced":
            newest = self.shell.state.members[message.learner]
            assert newest.generation > message.generation or newest.state == "dead"
            return
        assert (message.learner, message.generation) not in self.fenced, "a fenced process was answered"
        assert self.verdicts.setdefault(key, answered) == answered, "a verdict has changed"
        assert (answered.kind == "merged") == (key in self.merged)

    def sender(self, message: Contributed) -> tuple[Process, Place] | None:
        process = self.learners[message.learner].process
        if process is None or process.dead or process.generation != message.generation:
            return None
        place = process.places[message.fragment]
        return (process, place) if place.in_flight is message else None

    def take(self, message: Contributed, answered: Answered, process: Process, place: Place) -> None:
        """What an honest learner makes of an answer."""
        ledger = self.shell.state.ledger
        process.draining, process.final = ledger.draining, ledger.final
        if answered.kind == "fenced":
            process.dead = True
            return
        place.in_flight, place.base = None, ledger.fragments[message.fragment].version
        if answered.kind == "merged":
            place.pending -= message.samples
            place.told += message.samples
            place.merged_seq = message.seq
        elif not ledger.final and (answered.kind == "invalid" or place.pending > 6 * ROUND):
            place.discarded += place.pending
            place.pending = 0
        if self.shell.state.members[message.learner].state == "quarantined":
            process.dead = True

    def forget(self, message: Contributed) -> None:
        """Its sender dies with it: somebody else's bytes came in its place."""
        process = self.learners[message.learner].process
        if process and process.generation == message.generation:
            process.dead = True

    def join(self, learner: Learner) -> None:
        """A new process: as its checkpoint says where the syncer agrees with it, else from the shared weights."""
        before = copy.deepcopy(self.shell.state.ledger.fragments)
        old = learner.process
        if old is not None and not old.waiting:
            learner.books = old.places
        generation = self.shell.register(learner.name)
        self.fenced |= {(learner.name, one) for one in range(generation)}
        assert self.shell.state.ledger.fragments == before
        found = self.shell.state.members[learner.name].record
        waits = any(learner.name in one.arrivals for one in self.shell.state.rounds)
        process = learner.process = Process(generation, [Place() for _ in self.fragments], waiting=waits)
        if waits:
            return
        saved = learner.checkpoint
        exact = saved is not None and all(
            one.merged_seq == place.last_seq for one, place in zip(saved, found.places, strict=True)
        )
        for fragment, (place, known) in enumerate(zip(process.places, found.places, strict=True)):
            books = learner.books[fragment] if learner.books else Place()
            discovered = known.merged_samples - books.told
            flight = books.in_flight
            assert discovered == (flight.samples if flight and known.last_seq == flight.seq else 0)
            place.base, place.told, place.merged_seq = (
                max(0, before[fragment].version),
                known.merged_samples,
                known.last_seq,
            )
            place.seq = max(known.last_seq, books.seq)
            place.discarded = known.discarded_samples
            if exact:
                assert saved is not None
                place.base, place.pending = saved[fragment].base, saved[fragment].pending
                place.discarded = max(place.discarded, saved[fragment].discarded)
            before_death = books.pending - discovered + books.discarded
            learner.lost[fragment] += before_death - place.pending - place.discarded
            assert learner.lost[fragment] >= 0
        learner.books = copy.deepcopy(process.places)
        process.draining, process.final = self.shell.state.ledger.draining, self.shell.state.ledger.final

    # --- the syncer

    def merge(self, *, crash: bool) -> None:
        """One arrow of one sealed round, or of the end; or a death just before it."""
        shell = self.shell
        if crash:
            return self.do_kill_syncer()
        if shell.state.finishing:
            return shell.finish()
        moving = [one for one in shell.state.rounds if one.stage != "OPEN"]
        if not moving:
            return None
        current = self.random.choice(moving)
        fragment, number = current.fragment, current.number
        if current.stage == "SEALED":
            shell.do(MergeDone(now=shell.now, fragment=fragment))
        elif current.stage == "MERGED":
            digest = f"t{fragment}.{number}"
            shell.do(Committed(now=shell.now, fragment=fragment, theta_sha256=digest, model_sha256=""))
            assert len({one.learner for one in current.arrivals.values()}) == len(current.arrivals)
            for one in current.arrivals.values():
                key = (one.learner, one.generation, fragment, one.seq)
                assert key not in self.merged, "merged twice"
                assert key not in self.verdicts, "merged after another verdict"
                self.merged[key] = one.samples
                place = shell.head.members[sorted(shell.state.members).index(one.learner)].places[fragment]
                assert (place.last_seq, place.cursor) == (one.seq, one.cursor)
                assert place.discarded_samples >= one.discarded_samples
        else:
            shell.do(Published(now=shell.now, fragment=fragment))
        return None

    # --- what has to hold

    def check(self) -> None:
        state, ledger = self.shell.state, self.shell.state.ledger
        for fragment, record in enumerate(ledger.fragments):
            assert record.version >= self.versions[fragment], "a version went back"
            assert record.theta_sha256 == f"t{fragment}.{record.version}", "weights changed without a merge"
            self.versions[fragment] = record.version
            total = sum(samples for key, samples in self.merged.items() if key[2] == fragment)
            assert record.samples_total == total
        assert ledger.version == sum(self.versions)
        if self.rules.mode == "barrier":
            assert not ledger.draining
        arrived = {
            (one.fragment, one.number): {(name, each.generation, each.seq) for name, each in one.arrivals.items()}
            for one in state.rounds
        }
        sealed = {(one.fragment, one.number) for one in state.rounds if one.stage != "OPEN"}
        for place, before in self.arrived.items():
            now = arrived.get(place, before)
            assert now >= before, "an accepted contribution was dropped"
            assert now == before or place not in self.sealed, "a sealed round has changed"
        self.arrived, self.sealed = arrived, sealed
        for one in state.rounds:
            if one.stage == "OPEN" and one.arrivals:
                assert state.waiting_for(one.fragment), "an open round with arrivals waits for somebody"
                assert one.deadline is not None

    def audit(self) -> None:
        """The end: every learner's books, fragment by fragment, against the syncer's."""
        for name, learner in self.learners.items():
            process, member = learner.process, self.shell.state.members[name]
            assert process
            for fragment, place in enumerate(process.places):
                merged = sum(samples for key, samples in self.merged.items() if (key[0], key[2]) == (name, fragment))
                assert member.record.places[fragment].merged_samples == merged == place.told
                parts = (merged, place.pending, place.discarded, learner.lost[fragment])
                assert learner.run == sum(parts), f"{name}, fragment {fragment}: ran {learner.run}, {parts}"
        assert self.shell.state.ledger.samples_total >= self.rules.target_samples


def _key(message: Contributed) -> Key:
    return message.learner, message.generation, message.fragment, message.seq


def _lives(learner: Learner) -> bool:
    return learner.process is not None and not learner.process.dead and not learner.process.waiting


def _rests(learner: Learner) -> bool:
    """Nothing of it is on its way."""
    return _lives(learner) and learner.process is not None and not any(one.in_flight for one in learner.process.places)


_CHOICES = {
    World.do_train: 30,
    World.do_contribute: 20,
    World.do_deliver: 30,
    World.do_replay: 5,
    World.do_merge: 20,
    World.do_time: 8,
    World.do_kill_syncer: 1,
    World.do_kill_learner: 1,
    World.do_join: 2,
    World.do_checkpoint: 3,
    World.do_seed: 0.2,
}
_ACTIONS: Sequence[Any] = list(_CHOICES)
_WEIGHTS: Sequence[float] = list(_CHOICES.values())


def run_story(random: Random, *, steps: int) -> World:
    """A whole run: random things, then its end."""
    world = World(random)
    for _ in range(steps):
        world.act()
    world.settle()
    return world
