"""A run of the syncer without sockets: two learners by hand, and a syncer that can be killed at every step."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spec.events import Note, SyncMerged, read_events
from spec.sync import SyncConfig
from storage import Bucket
from tests.builders.sync_world import LAYOUT, ROUND_SAMPLES, ema_of, make_plan, seed_weights, train
from training.sync.contract import contract_hash
from training.sync.journal import Journal
from training.sync.layout import Floats, Layout
from training.sync.messages import Contribution, PartHeader, PartReceipt, RegisterArgs, SeedHeader, Verdict
from training.sync.store import Store
from training.sync.syncer import Syncer

ROUNDS = 3


class Crash(BaseException):
    """The process is gone."""


@dataclass
class Trap:
    """Springs at the n-th passing of a point."""

    name: str = ""
    number: int = 0
    action: Callable[[], None] = lambda: None
    passed: Counter[str] = field(default_factory=Counter[str])
    sprung: bool = False

    def __call__(self, name: str) -> None:
        self.passed[name] += 1
        if name == self.name and self.passed[name] == self.number:
            self.sprung = True
            self.action()


def crash() -> None:
    raise Crash


@dataclass(frozen=True)
class Kind:
    """What is exercised: mode and number of fragments."""

    mode: Literal["barrier", "decoupled"] = "barrier"
    fragments: int = 1

    def __str__(self) -> str:
        return f"{self.mode}-{self.fragments}"

    @property
    def rounds(self) -> int:
        """Of every learner, before the end."""
        return ROUNDS if self.mode == "barrier" else ROUNDS - 1

    @property
    def config(self) -> SyncConfig:
        return SyncConfig.model_validate(
            {
                "mode": self.mode,
                "fragments": self.fragments,
                "round_deadline": "20s",
                "lease": "20s",
                "outer_momentum": 0.5,
                "keep_states": 2,
            }
        )

    @property
    def layout(self) -> Layout:
        return Layout.from_shapes(LAYOUT.shapes(), fragments=self.fragments)


BARRIER, DECOUPLED = Kind(), Kind("decoupled")
KINDS = [BARRIER, Kind("barrier", 2), DECOUPLED, Kind("decoupled", 2)]


@dataclass
class Bench:
    """A run without sockets: two learners and a syncer that is made anew whenever it crashed."""

    folder: Path
    bucket: Bucket
    kind: Kind = BARRIER
    trap: Trap = field(default_factory=Trap)
    crashes: int = 0
    pods: int = 0

    def __post_init__(self) -> None:
        self.plan = make_plan(
            self.folder, target=self.kind.rounds * 2 * ROUND_SAMPLES, store=self.bucket.uri, config=self.kind.config
        )
        self.layout = self.kind.layout
        self.generation: dict[str, int] = {}
        self.weights: dict[tuple[int, int], Floats] = {}
        """What learners were given, by fragment and version."""
        self.syncer = self.survive(self.make)

    def make(self) -> Syncer:
        """Every syncer begins with an empty folder of its own."""
        self.pods += 1
        store = Store(self.bucket, keep_states=2, work=self.folder / f"pod-{self.pods}", point=self.trap)
        return Syncer(self.plan, store=store, journal=Journal(self.folder / "events.jsonl"), retry_seconds=0.001)

    def survive(self, work: Callable[[], Any]) -> Any:
        """Do something again until the syncer lives through it."""
        while True:
            try:
                return work()
            except Crash:
                self.crashes += 1
                if hasattr(self, "syncer"):
                    self.syncer = self.survive(self.make)

    def register(self, name: str) -> RegisterArgs:
        return RegisterArgs(
            learner=name,
            shapes=self.layout.shapes(),
            fingerprint=self.layout.fingerprint,
            contract=contract_hash(self.plan),
            world_size=1,
        )

    def begin(self) -> None:
        for name in ("east", "west"):
            args = self.register(name)
            self.generation[name] = self.survive(lambda args=args: self.syncer.desk.register(args)).generation
        theta = seed_weights()
        seed = SeedHeader(
            learner="east",
            generation=self.generation["east"],
            fingerprint=self.layout.fingerprint,
            shapes=self.layout.shapes(),
            sha256=hashlib.sha256(theta.tobytes()).hexdigest(),
        )
        self.survive(lambda: self.syncer.desk.seed(seed, theta=theta, ema=None))
        for fragment in range(self.kind.fragments):
            self.fetch(fragment, version=0)

    def fetch(self, fragment: int, *, version: int) -> Floats:
        """Weights as a learner got them when they were new."""
        if (fragment, version) not in self.weights:
            self.weights[fragment, version] = self.syncer.desk.weights(version, fragment=fragment)[0].copy()
        return self.weights[fragment, version]

    def send(
        self,
        learner: str,
        *,
        seq: int,
        base: int,
        delta: Floats,
        ema: Floats,
        fragment: int = 0,
        samples: int = ROUND_SAMPLES,
        last: bool = False,
    ) -> Contribution:
        """All parts of a contribution, and what is then committed. `ema` counts from the base, like `delta`."""
        data = delta.tobytes() + ema.tobytes()
        header = PartHeader(
            learner=learner,
            generation=self.generation[learner],
            fragment=fragment,
            seq=seq,
            rank=0,
            fingerprint=self.layout.fingerprint,
            ranges=[self.layout.fragment_range(fragment)],
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
        )
        slot = self.syncer.desk.reserve_part(header)
        if slot is not None:
            slot.upload.data[:] = np.frombuffer(data, np.uint8)
            self.syncer.desk.finish_part(slot)
        return Contribution(
            learner=learner,
            generation=self.generation[learner],
            fragment=fragment,
            seq=seq,
            base_version=base,
            steps=1,
            samples=samples,
            cursor=seq * ROUND_SAMPLES,
            parts=[PartReceipt(rank=0, sha256=header.sha256)],
            fingerprint=self.layout.fingerprint,
            last=last,
        )

    def offer(self, learner: str, *, seq: int, base: int, fragment: int = 0, **more: Any) -> Verdict | None:
        """The same bytes whenever it is called."""
        before = self.fetch(fragment, version=base)
        after = train(before, learner=learner, cursor=seq)
        sent = self.send(
            learner,
            seq=seq,
            base=base,
            fragment=fragment,
            delta=after - before,
            ema=ema_of(after) - before,
            **more,
        )
        return self.syncer.desk.commit(sent, wait_seconds=0)

    def merge(self, names: Sequence[str], *, number: int, fragment: int, **more: Any) -> None:
        """Contributions to one merge, again and again with the same bytes, until all have their verdict."""

        def work() -> None:
            verdicts: list[Verdict | None] = []
            for _ in range(2):
                verdicts = [self.offer(name, fragment=fragment, **more) for name in names]
                self.syncer.worker.work_once()
            assert [one.kind if one else None for one in verdicts] == ["merged"] * len(names)
            assert {one.round for one in verdicts if one} == {number}
            self.fetch(fragment, version=number)

        self.survive(work)

    def round(self, number: int) -> None:
        """A round of each fragment: of all learners together, or of one after the other, on bases that grow stale."""
        for fragment in range(self.kind.fragments):
            if self.kind.mode == "barrier":
                self.merge(("east", "west"), number=number, fragment=fragment, seq=number, base=number - 1)
            else:
                start = 2 * (number - 1)
                self.merge(("east",), number=start + 1, fragment=fragment, seq=number, base=start)
                self.merge(("west",), number=start + 2, fragment=fragment, seq=number, base=max(0, start - 1))

    def drain(self) -> None:
        """Everybody's last contribution, then the end."""
        start = 2 * self.kind.rounds
        for fragment in range(self.kind.fragments):
            more: dict[str, Any] = {"seq": self.kind.rounds + 1, "base": start, "samples": 7, "last": True}
            self.merge(("east", "west"), number=start + 1, fragment=fragment, **more)
        self.survive(self.syncer_works)

    def syncer_works(self) -> None:
        self.syncer.worker.tick()
        self.syncer.worker.work_once()

    def outcome(self) -> tuple[object, ...]:
        """Everything that has to be equal, read from the disk by a new syncer."""
        core = self.survive(self.make).core
        assert len(core.arrays) == self.kind.fragments
        ledger = core.state.durable()
        return (
            [
                (
                    one.outer.theta.tobytes(),
                    one.outer.momentum.tobytes(),
                    one.outer.accumulated.tobytes(),
                    one.outer.rounds_accumulated,
                    one.average.tobytes(),
                )
                for one in core.arrays
            ],
            (ledger.version, ledger.samples_total, ledger.final, ledger.draining, ledger.theta_sha256),
            ledger.model_sha256,
            [(one.version, one.samples_total, one.norms, one.theta_sha256) for one in ledger.fragments],
            [
                [
                    (place.merged_samples, place.discarded_samples, place.last_seq, place.cursor, place.base_version)
                    for place in one.places
                ]
                for one in ledger.members
            ],
        )

    def merges(self) -> list[int]:
        events = read_events((self.folder / "events.jsonl").read_text().splitlines())
        return [one.round for one in events if isinstance(one, SyncMerged)]

    def alarms(self) -> list[str]:
        events = read_events((self.folder / "events.jsonl").read_text().splitlines())
        return [one.text for one in events if isinstance(one, Note) and one.level == "error"]

    def run(self) -> tuple[object, ...]:
        self.begin()
        for number in range(1, self.kind.rounds + 1):
            self.round(number)
        if self.kind.mode == "decoupled":
            self.drain()
        status = self.syncer.desk.status()
        assert (status.state, status.final) == ("FINAL", True)
        return self.outcome()
