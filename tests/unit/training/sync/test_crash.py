"""Kill the syncer at every step of its work, or fill its disk: weights and ledger come out as if nothing happened."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from spec.errors import ConfigError, DataError
from spec.events import Note, SyncMerged, read_events
from spec.sync import SyncConfig
from storage import Bucket, open_bucket
from tests.builders.object_store import QUICK, ObjectServer, Wire, environment_for, serve_objects
from tests.builders.sync_world import LAYOUT, ROUND_SAMPLES, ema_of, make_plan, seed_weights, train
from training.sync.contract import contract_hash
from training.sync.journal import Journal
from training.sync.layout import Floats, Layout
from training.sync.messages import Contribution, PartHeader, PartReceipt, RegisterArgs, SeedHeader, Verdict
from training.sync.refusals import Refusal
from training.sync.store import DeposedError, Store
from training.sync.syncer import Syncer

POINTS = (
    "sealed", "merged", "model-opened", "model-written", "model-named", "state-opened", "state-written", "state-named",
    "head-written", "head-named", "durable", "published",
)  # fmt: skip
KEPT = ("model-kept", "state-kept")
"""Passed only where the store is no folder of the syncer's machine."""
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


BARRIER = Kind()
KINDS = [BARRIER, Kind("barrier", 2), Kind("decoupled", 1), Kind("decoupled", 2)]


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


Build = Callable[..., Bench]
Calm = tuple[tuple[object, ...], Counter[str]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serve_objects(tmp_path_factory.mktemp("store")) as one:
        yield one


def in_folder(folder: Path, **options: Any) -> Bench:
    return Bench(folder, open_bucket((folder / "sync").as_uri()), **options)


@pytest.fixture(scope="module", params=["folder", "objects"])
def build(request: pytest.FixtureRequest) -> Build:
    """Makes benches on a store of each kind."""
    if request.param == "folder":
        return in_folder
    find: Callable[[str], ObjectServer] = request.getfixturevalue
    server = find("server")

    def in_objects(folder: Path, **options: Any) -> Bench:
        return Bench(folder, server.open(), **options)

    return in_objects


@pytest.fixture(scope="module")
def calm(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Calm]:
    """The outcome without crashes, and how often each point is passed."""
    found: dict[Kind, Calm] = {}

    def find(kind: Kind = BARRIER) -> Calm:
        if kind not in found:
            bench = build(tmp_path_factory.mktemp("calm"), kind=kind)
            found[kind] = bench.run(), bench.trap.passed
        return found[kind]

    return find


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_kinds_of_store_come_to_the_same_bits(kind: Kind, calm: Callable[..., Calm], tmp_path: Path) -> None:
    assert in_folder(tmp_path, kind=kind).run() == calm(kind)[0]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("point", [*POINTS, *KEPT])
def test_a_crash_at_any_step_changes_nothing(
    point: str, kind: Kind, calm: Callable[..., Calm], build: Build, tmp_path: Path
) -> None:
    expected, passed = calm(kind)
    if build is in_folder and point in KEPT:
        assert not passed[point]
        return
    if build is not in_folder and kind not in (BARRIER, KINDS[-1]):
        pytest.skip("which store it is matters to the writes, and these are the same in every kind")
    assert passed[point] >= kind.rounds
    for number in range(1, passed[point] + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = build(folder, kind=kind, trap=Trap(name=point, number=number, action=crash))
        assert bench.run() == expected, f"{point}, passing {number}"
        assert bench.trap.sprung
        assert bench.merges() == list(range(1, passed["durable"] + 1))
        assert not list(folder.glob("sync/**/*.tmp"))


@pytest.mark.parametrize("point", ["model-opened", "model-written", "state-opened", "state-written", "head-written"])
def test_a_full_disk_publishes_nothing_raises_an_alarm_and_goes_on_when_there_is_room(
    point: str, calm: Callable[..., Calm], build: Build, tmp_path: Path
) -> None:
    bench = build(tmp_path)
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
    assert len(bench.alarms()) == 3
    assert "No space left on device" in bench.alarms()[0]
    bench.trap.name = ""
    assert bench.outcome() == calm()[0]


def test_a_registration_that_cannot_be_made_durable_is_not_given(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
    bench.begin()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    bench.trap.name, bench.trap.number, bench.trap.action = "head-written", bench.trap.passed["head-written"] + 1, full
    args = bench.register("west")
    with pytest.raises(OSError, match="No space left"):
        bench.syncer.desk.register(args)
    assert bench.syncer.core.state.members["west"].generation == 1
    assert bench.syncer.desk.register(args).generation == 2
    assert bench.make().core.state.members["west"].generation == 2


def test_a_deposed_syncer_cannot_commit(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
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


def test_damaged_missing_or_foreign_state_is_refused_with_place_and_remedy(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
    bench.begin()
    bench.round(1)
    key = f"states/{bench.syncer.core.store.head.states[0].file}"
    data = bench.bucket.get(key).data
    bench.bucket.put(key, data[:-4] + b"\0\0\0\1")
    with pytest.raises(DataError, match=r"(?s)the committed state is damaged.*hint: restore"):
        bench.make()
    bench.bucket.delete([key])
    with pytest.raises(DataError, match="the committed state is missing"):
        bench.make()
    bench.bucket.put(key, data)
    assert bench.plan.syncer is not None
    config = bench.plan.syncer.config.model_copy(update={"outer_momentum": 0.1})
    bench.plan = make_plan(tmp_path, config=config, store=bench.bucket.uri)
    with pytest.raises(ConfigError, match="other sync settings"):
        bench.make()
    # None of the refused starts has deposed anybody.
    bench.syncer.core.store.check()


def test_only_so_many_states_are_kept_and_earlier_versions_are_served_from_them(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
    bench.run()
    assert len(list(bench.bucket.list("states"))) == 2
    bench.syncer = bench.make()
    assert bench.syncer.desk.weights(2)[0].shape == (LAYOUT.total,)
    with pytest.raises(Refusal, match="the newest is 3"):
        bench.syncer.desk.weights(1)


def test_contributions_with_bad_data_get_an_invalid_verdict(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
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


@pytest.fixture
def wire(server: ObjectServer) -> Iterator[Wire]:
    one = Wire(server.port)
    yield one
    one.close()


@pytest.fixture
def wired(server: ObjectServer, wire: Wire, tmp_path: Path) -> Bench:
    """A bench whose store is at the other end of a wire; version 0 is committed."""
    (tmp_path / "wired").mkdir()
    bench = Bench(
        tmp_path / "wired", open_bucket(server.uri(), environment=environment_for(wire.port), limits=QUICK)
    )  # fmt: skip
    bench.begin()
    return bench


@pytest.fixture
def expected(tmp_path: Path) -> tuple[object, ...]:
    """The outcome of an undisturbed run."""
    (tmp_path / "calm").mkdir()
    return in_folder(tmp_path / "calm").run()


def test_a_bucket_that_is_away_stops_nothing_for_good(wired: Bench, wire: Wire, expected: tuple[object, ...]) -> None:
    """It is gone when a round is about to be committed, and answers again after two alarms."""
    versions: list[int] = []

    def cut() -> None:
        wire.cut = True

    def look() -> None:
        versions.append(wired.syncer.desk.status().version)
        wire.cut = len(versions) < 2

    wired.trap.name, wired.trap.action = "state-named", cut
    wired.trap.number = wired.trap.passed["state-named"] + 1
    wired.syncer.core.stopping = Pauses(look)
    for number in range(1, ROUNDS + 1):
        wired.round(number)
    assert versions == [0, 0], "nothing was published before it was kept"
    assert len(wired.alarms()) == 2
    assert "the object store failed" in wired.alarms()[0]
    assert wired.outcome() == expected


@pytest.mark.parametrize("then", ["is tried again", "another ledger is saved", "the syncer is restarted"])
def test_a_commit_whose_answer_is_lost_counts_once(
    wired: Bench, wire: Wire, expected: tuple[object, ...], then: str
) -> None:
    """HEAD names the new state, but nobody could tell the syncer: it tells nobody else, and finds its own write."""

    def lose() -> None:
        wire.lose_answers, wire.cut_then = 1, True

    def mend() -> None:
        core = wired.syncer.core
        assert (wire.cut, core.state.version) == (True, 0)
        wire.cut = wire.cut_then = False
        if then == "another ledger is saved":
            core.store.commit(core.state.durable())
        if then == "the syncer is restarted":
            raise Crash

    wired.trap.name, wired.trap.action = "head-written", lose
    wired.trap.number = wired.trap.passed["head-written"] + 1
    wired.syncer.core.stopping = Pauses(mend)
    for number in range(1, ROUNDS + 1):
        wired.round(number)
    assert len(wired.alarms()) == 1
    assert wired.outcome() == expected
    assert wired.merges() == [1, 2, 3]


class Pauses(threading.Event):
    """Stands where the syncer pauses before it tries a commit again."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action = action

    def wait(self, timeout: float | None = None) -> bool:
        self._action()
        return False


def test_of_two_syncers_that_start_at_once_one_fences_the_other(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
    for _ in range(3):
        met, made = threading.Barrier(2), list[Syncer]()

        def start(met: threading.Barrier = met, made: list[Syncer] = made) -> None:
            met.wait(20)
            made.append(bench.make())

        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        first, second = sorted(made, key=lambda one: one.core.state.epoch)
        assert second.core.state.epoch == first.core.state.epoch + 1
        second.core.store.check()
        with pytest.raises(DeposedError):
            first.core.store.check()


def test_models_are_served_by_a_syncer_that_did_not_write_them(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
    bench.run()
    syncer = bench.make()
    digest = syncer.core.state.ledger.model_sha256
    with syncer.desk.open_model(digest) as file:
        assert hashlib.sha256(file.read()).hexdigest() == digest
    with pytest.raises(FileNotFoundError):
        syncer.desk.open_model("0" * 64)


def test_a_syncer_that_was_replaced_removes_nothing_of_its_successor(build: Build, tmp_path: Path) -> None:
    bench = build(tmp_path)
    bench.begin()
    bench.round(1)
    old, bench.syncer = bench.syncer, bench.make()
    for number in (2, 3):
        bench.round(number)
    old.core.store.prune()
    assert bench.outcome()
    assert bench.make().desk.weights(2)[0].shape == (LAYOUT.total,)
