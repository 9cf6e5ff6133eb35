"""Kill the syncer at every step of its work, or fill its disk: weights and ledger come out as if nothing happened."""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.errors import ConfigError, DataError
from spec.events import Note, SyncMerged, read_events
from tests.builders.sync_world import LAYOUT, ROUND_SAMPLES, ema_of, make_plan, seed_weights, train
from training.sync.contract import contract_hash
from training.sync.journal import Journal
from training.sync.layout import Floats
from training.sync.messages import Contribution, PartHeader, PartReceipt, RegisterArgs, SeedHeader, Verdict
from training.sync.refusals import Refusal
from training.sync.store import DeposedError, Store
from training.sync.syncer import Syncer

POINTS = (
    "sealed", "merged", "model-opened", "model-written", "model-named", "state-opened", "state-written", "state-named",
    "head-written", "head-named", "durable", "published",
)  # fmt: skip
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


@dataclass
class Bench:
    """A run without sockets: two learners and a syncer that is made anew whenever it crashed."""

    folder: Path
    trap: Trap = field(default_factory=Trap)
    crashes: int = 0

    def __post_init__(self) -> None:
        self.plan = make_plan(self.folder, target=ROUNDS * 2 * ROUND_SAMPLES)
        self.generation: dict[str, int] = {}
        self.syncer = self.survive(self.make)

    def make(self) -> Syncer:
        store = Store(self.folder / "sync", keep_states=2, point=self.trap)
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

    def begin(self) -> None:
        contract = contract_hash(self.plan)
        for name in ("east", "west"):
            args = RegisterArgs(
                learner=name, shapes=LAYOUT.shapes(), fingerprint=LAYOUT.fingerprint, contract=contract, world_size=1
            )
            self.generation[name] = self.survive(lambda args=args: self.syncer.desk.register(args)).generation
        theta = seed_weights()
        seed = SeedHeader(
            learner="east",
            generation=self.generation["east"],
            fingerprint=LAYOUT.fingerprint,
            shapes=LAYOUT.shapes(),
            sha256=hashlib.sha256(theta.tobytes()).hexdigest(),
        )
        self.survive(lambda: self.syncer.desk.seed(seed, theta=theta, ema=None))

    def send(self, learner: str, *, seq: int, base: int, delta: Floats, ema: Floats) -> Contribution:
        digest = hashlib.sha256(delta.tobytes() + ema.tobytes()).hexdigest()
        header = PartHeader(
            learner=learner,
            generation=self.generation[learner],
            seq=seq,
            rank=0,
            fingerprint=LAYOUT.fingerprint,
            ranges=LAYOUT.whole,
            sha256=digest,
        )
        slot = self.syncer.desk.reserve_part(header)
        if slot is not None:
            slot.delta[:], slot.ema[:] = delta, ema
            self.syncer.desk.finish_part(slot, received=True)
        return Contribution(
            learner=learner,
            generation=self.generation[learner],
            seq=seq,
            base_version=base,
            steps=1,
            samples=ROUND_SAMPLES,
            cursor=seq * ROUND_SAMPLES,
            parts=[PartReceipt(rank=0, sha256=digest)],
            fingerprint=LAYOUT.fingerprint,
        )

    def round(self, number: int) -> None:
        """Both learners contribute, again and again with the same bytes, until both have a verdict."""
        base = self.syncer.desk.weights(number - 1)
        local = {name: train(base, learner=name, cursor=number) for name in ("east", "west")}

        def work() -> None:
            verdicts: list[Verdict | None] = []
            for _ in range(2):
                verdicts.clear()
                for name, theta in local.items():
                    sent = self.send(name, seq=number, base=number - 1, delta=theta - base, ema=ema_of(theta))
                    verdicts.append(self.syncer.desk.commit(sent, wait_seconds=0))
                self.syncer.worker.work_once()
            assert [one.kind if one else None for one in verdicts] == ["merged", "merged"]
            assert {one.round for one in verdicts if one} == {number}

        self.survive(work)

    def outcome(self) -> tuple[object, ...]:
        """Everything that has to be equal, read from the disk by a new syncer."""
        core = self.survive(self.make).core
        assert core.outer is not None
        ledger = core.state.durable()
        return (
            core.outer.theta.tobytes(),
            core.outer.momentum.tobytes(),
            core.outer.accumulated.tobytes(),
            core.outer.rounds_accumulated,
            (
                ledger.version,
                ledger.samples_total,
                ledger.final,
                ledger.theta_sha256,
                ledger.model_sha256,
                ledger.norms,
            ),
            [
                (one.learner, one.merged_samples, one.discarded_samples, one.last_seq, one.cursor)
                for one in ledger.members
            ],
        )

    def merges(self) -> list[int]:
        events = read_events((self.folder / "events.jsonl").read_text().splitlines())
        return [one.round for one in events if isinstance(one, SyncMerged)]

    def run(self) -> tuple[object, ...]:
        self.begin()
        for number in range(1, ROUNDS + 1):
            self.round(number)
        return self.outcome()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[object, ...], Counter[str]]:
    """The outcome without crashes, and how often each point is passed."""
    bench = Bench(tmp_path_factory.mktemp("calm"))
    return bench.run(), bench.trap.passed


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_step_changes_nothing(
    point: str, calm: tuple[tuple[object, ...], Counter[str]], tmp_path: Path
) -> None:
    expected, passed = calm
    assert passed[point] >= ROUNDS
    for number in range(1, passed[point] + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = Bench(folder, Trap(name=point, number=number, action=crash))
        assert bench.run() == expected, f"{point}, passing {number}"
        assert bench.trap.sprung
        assert bench.merges() == [1, 2, 3]
        assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("point", ["model-opened", "model-written", "state-opened", "state-written", "head-written"])
def test_a_full_disk_publishes_nothing_raises_an_alarm_and_goes_on_when_there_is_room(
    point: str, calm: tuple[tuple[object, ...], Counter[str]], tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    bench.begin()
    versions: list[int] = []

    def full() -> None:
        versions.append(bench.syncer.desk.status().version)
        bench.trap.number += 1 if len(versions) < 3 else 0
        raise OSError(errno.ENOSPC, "No space left on device")

    bench.trap.name, bench.trap.action = point, full
    bench.trap.number = bench.trap.passed[point] + 1
    for number in range(1, ROUNDS + 1):
        bench.round(number)
    assert versions == [0, 0, 0]
    assert bench.syncer.desk.status().alarm == ""
    events = list(read_events((tmp_path / "events.jsonl").read_text().splitlines()))
    alarms = [one.text for one in events if isinstance(one, Note) and one.level == "error"]
    assert len(alarms) == 3
    assert "No space left on device" in alarms[0]
    bench.trap.name = ""
    assert bench.outcome() == calm[0]


def test_a_registration_that_cannot_be_made_durable_is_not_given(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    bench.trap.name, bench.trap.number, bench.trap.action = "head-written", bench.trap.passed["head-written"] + 1, full
    args = RegisterArgs(
        learner="west",
        shapes=LAYOUT.shapes(),
        fingerprint=LAYOUT.fingerprint,
        contract=contract_hash(bench.plan),
        world_size=1,
    )
    with pytest.raises(OSError, match="No space left"):
        bench.syncer.desk.register(args)
    assert bench.syncer.core.state.members["west"].generation == 1
    assert bench.syncer.desk.register(args).generation == 2
    assert bench.make().core.state.members["west"].generation == 2


def test_a_deposed_syncer_cannot_commit(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin()
    old = bench.syncer
    base = seed_weights()
    for name in ("east", "west"):
        sent = bench.send(name, seq=1, base=0, delta=base, ema=base)
        old.desk.commit(sent, wait_seconds=0)
    new = bench.make()
    assert old.worker.work_once() is False
    assert isinstance(old.core.failure, DeposedError)
    assert "epoch 2, mine is 1" in str(old.core.failure)
    assert new.desk.status().version == 0
    bench.syncer = new
    bench.round(1)
    assert new.desk.status().version == 1


def test_damaged_missing_or_foreign_state_is_refused_with_place_and_remedy(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin()
    bench.round(1)
    assert bench.syncer.core.store.head.state is not None
    path = tmp_path / "sync/states" / bench.syncer.core.store.head.state.file
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"\0\0\0\1")
    with pytest.raises(DataError, match=r"(?s)the committed state is damaged.*hint: restore"):
        bench.make()
    path.unlink()
    with pytest.raises(DataError, match="the committed state is missing"):
        bench.make()
    path.write_bytes(data)
    assert bench.plan.syncer is not None
    config = bench.plan.syncer.config.model_copy(update={"outer_momentum": 0.1})
    bench.plan = make_plan(tmp_path, config=config)
    with pytest.raises(ConfigError, match="other sync settings"):
        bench.make()
    # None of the refused starts has deposed anybody.
    bench.syncer.core.store.check()


def test_only_so_many_states_are_kept_and_earlier_versions_can_be_fetched_from_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    assert len(list((tmp_path / "sync/states").iterdir())) == 2
    assert bench.syncer.desk.weights(2).shape == (LAYOUT.total,)
    with pytest.raises(Refusal, match="the newest is 3"):
        bench.syncer.desk.weights(1)


def test_contributions_with_bad_data_get_an_invalid_verdict(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin()
    bad = np.full(LAYOUT.total, np.nan, np.float32)
    good = np.zeros(LAYOUT.total, np.float32)
    verdict = bench.syncer.desk.commit(bench.send("east", seq=1, base=0, delta=bad, ema=good), wait_seconds=0)
    assert verdict is not None
    assert (verdict.kind, "displacement has elements that are not finite" in verdict.reason) == ("invalid", True)
    verdict = bench.syncer.desk.commit(bench.send("east", seq=2, base=0, delta=good, ema=bad), wait_seconds=0)
    assert verdict is not None
    assert (verdict.kind, "EMA has elements" in verdict.reason) == ("invalid", True)
    assert bench.syncer.desk.commit(bench.send("west", seq=1, base=0, delta=good, ema=good), wait_seconds=0) is None
