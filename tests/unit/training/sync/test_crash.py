"""Invariant I9: kill the syncer at every step of its work, or fill its disk, and weights and ledger come out as if
nothing had happened.
"""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.errors import ConfigError, DataError, UnreachableError
from storage import Stored, open_bucket
from storage.folder import Folder
from tests.builders.object_store import QUICK, ObjectServer, Wire, environment_for, serve_objects
from tests.builders.sync_bench import BARRIER, DECOUPLED, KINDS, ROUNDS, Bench, Crash, Kind, Trap, crash
from tests.builders.sync_world import LAYOUT, make_plan, seed_weights, wait_until
from training.sync.contract import contract_hash
from training.sync.core import FETCH_SECONDS
from training.sync.journal import Journal
from training.sync.messages import RegisterArgs
from training.sync.refusals import Refusal
from training.sync.store import DeposedError, Store
from training.sync.syncer import Syncer

POINTS = (
    "sealed", "merged", "model-opened", "model-written", "model-named", "state-opened", "state-written", "state-named",
    "head-written", "head-named", "durable", "published",
)  # fmt: skip
KEPT = ("model-kept", "state-kept")
"""Passed only where the store is no folder of the syncer's machine."""


STORES = ("folder", "objects")
MATRIX = [*(("folder", kind) for kind in KINDS), *(("objects", kind) for kind in (KINDS[0], KINDS[-1]))]
"""Which store it is matters to the writes, and these are the same in every kind."""
Build = Callable[..., Bench]
Calm = tuple[tuple[object, ...], Counter[str]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serve_objects(tmp_path_factory.mktemp("store")) as one:
        yield one


def in_folder(folder: Path, **options: Any) -> Bench:
    return Bench(folder, open_bucket((folder / "sync").as_uri()), **options)


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest) -> Callable[[str], Build]:
    """Makes benches on a store of one kind; the object store starts when it is first asked for."""

    def in_objects(folder: Path, **options: Any) -> Bench:
        server: ObjectServer = request.getfixturevalue("server")
        return Bench(folder, server.open(), **options)

    return lambda store: in_folder if store == "folder" else in_objects


@pytest.fixture(scope="module", params=STORES)
def build(request: pytest.FixtureRequest, builds: Callable[[str], Build]) -> Build:
    """Makes benches on a store of each kind."""
    return builds(request.param)


@pytest.fixture(scope="module")
def calm(builds: Callable[[str], Build], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Kind], Calm]:
    """The outcome without crashes, and how often each point is passed."""
    found: dict[tuple[str, Kind], Calm] = {}

    def find(store: str, kind: Kind) -> Calm:
        if (store, kind) not in found:
            bench = builds(store)(tmp_path_factory.mktemp("calm"), kind=kind)
            found[store, kind] = bench.run(), bench.trap.passed
        return found[store, kind]

    return find


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_kinds_of_store_come_to_the_same_bits(kind: Kind, calm: Callable[[str, Kind], Calm]) -> None:
    assert calm("folder", kind)[0] == calm("objects", kind)[0]


@pytest.mark.parametrize(("store", "kind"), MATRIX, ids=str)
@pytest.mark.parametrize("point", [*POINTS, *KEPT])
def test_a_crash_at_any_step_changes_nothing(
    point: str,
    store: str,
    kind: Kind,
    calm: Callable[[str, Kind], Calm],
    builds: Callable[[str], Build],
    tmp_path: Path,
) -> None:
    expected, passed = calm(store, kind)
    if store == "folder" and point in KEPT:
        assert not passed[point]
        return
    assert passed[point] >= kind.rounds
    for number in range(1, passed[point] + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = builds(store)(folder, kind=kind, trap=Trap(name=point, number=number, action=crash))
        assert bench.run() == expected, f"{point}, passing {number}"
        assert bench.trap.sprung
        assert bench.merges() == list(range(1, passed["durable"] + 1))
        assert not list(folder.glob("sync/**/*.tmp"))


@pytest.mark.parametrize("point", ["model-opened", "model-written", "state-opened", "state-written", "head-written"])
def test_a_full_disk_publishes_nothing_raises_an_alarm_and_goes_on_when_there_is_room(
    point: str, calm: Callable[[str, Kind], Calm], build: Build, tmp_path: Path
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
    assert bench.outcome() == calm("folder", BARRIER)[0]


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


def test_a_version_that_a_learner_is_fetching_stays_until_it_asks_for_another(build: Build, tmp_path: Path) -> None:
    """Over a slow link a fetch outlasts many merges: one that began anew each time would never end."""
    bench = build(tmp_path, kind=DECOUPLED)
    bench.begin()
    desk, clock = bench.syncer.desk, bench.syncer.core.clock
    first = desk.weights(0, learner="east")[0].tobytes()
    bench.round(1)
    bench.round(2)
    assert bench.syncer.core.state.versions == [4]
    assert desk.weights(0, learner="east")[0].tobytes() == first
    with pytest.raises(Refusal, match="the newest is 4"):
        desk.weights(2, learner="west")
    desk.weights(4, learner="east")
    bench.merge(("east",), number=5, fragment=0, seq=3, base=4)
    with pytest.raises(Refusal, match="the newest is 5"):
        desk.weights(0, learner="east")
    assert len(list(bench.bucket.list("states"))) == 2
    # Whoever has not asked for long has it, or is gone.
    desk.weights(4, learner="east")
    bench.syncer.core.clock = lambda: clock() + FETCH_SECONDS + 1
    for number in (6, 7):
        bench.merge(("west",), number=number, fragment=0, seq=number, base=5)
    with pytest.raises(Refusal, match="the newest is 7"):
        desk.weights(4, learner="east")


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
    assert not verdict.quarantined
    bench.syncer.desk.commit(bench.send("east", seq=3, base=0, delta=bad, ema=good), wait_seconds=0)
    bench.generation["east"] = bench.syncer.desk.register(bench.register("east")).generation
    verdict = bench.syncer.desk.commit(bench.send("east", seq=4, base=0, delta=bad, ema=good), wait_seconds=0)
    assert verdict is not None
    assert verdict.quarantined, "taken again on probation, it is told at once"
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


class Forgetful(Folder):
    """Says once, where it has replaced HEAD, that it does not know whether it has."""

    loses = False

    def replace(self, key: str, data: bytes, *, tag: str) -> str:
        found = super().replace(key, data, tag=tag)
        if self.loses:
            self.loses = False
            raise UnreachableError("no answer came", where=key)
        return found


@pytest.mark.parametrize("point", ["state-written", "state-named", "head-written"])
def test_a_crash_while_a_commit_whose_answer_was_lost_is_tried_again_changes_nothing(
    point: str, expected: tuple[object, ...], tmp_path: Path
) -> None:
    """HEAD names the state already: the second try must not put other bytes under that name."""
    store = Forgetful(tmp_path / "sync")
    bench = Bench(tmp_path, store)
    bench.begin()

    def lose() -> None:
        store.loses = True
        bench.trap.name, bench.trap.number, bench.trap.action = point, bench.trap.passed[point] + 1, crash

    bench.trap.name, bench.trap.number, bench.trap.action = "head-written", bench.trap.passed["head-written"] + 1, lose
    for number in range(1, ROUNDS + 1):
        bench.round(number)
    assert (bench.crashes, len(bench.alarms())) == (1, 1)
    assert bench.outcome() == expected
    assert bench.merges() == [1, 2, 3]


def test_what_a_writer_that_was_killed_left_is_swept_away(tmp_path: Path) -> None:
    """SIGKILL comes between the bytes of HEAD and its name; and in the middle of a state fetched from a bucket."""
    bench = in_folder(tmp_path)
    bench.begin()
    folder = tmp_path / "sync"
    program = (
        "import os, sys; from pathlib import Path; from storage.folder import Folder, appearing\n"
        "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "place = Path(sys.argv[1])\n"
        "if sys.argv[2:]: Folder(place).put('HEAD.json', b'{}')\n"
        "with appearing(place / 'states' / 'state'): os.fsync(0)\n"
    )
    for extra in ([], ["head"]):
        assert subprocess.run([sys.executable, "-c", program, f"{folder}", *extra], check=False).returncode == -9
    left = [path for path in folder.rglob(".partial-*") if "lock" not in path.name]
    assert {path.parent.name for path in left} == {"sync", "states"}
    bench.make()
    assert [path.name for path in folder.rglob(".partial-*")] == [".partial-lock-HEAD.json"]


class Slow(Folder):
    """Answers no reader until it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may = threading.Event()
        self.may.set()

    def get(self, key: str) -> Stored:
        assert self.may.wait(60)
        return super().get(key)


def test_leases_run_out_while_the_store_answers_no_reader(tmp_path: Path) -> None:
    """Or everybody would wait for who is gone: the syncer would think that it had stood still itself."""
    store = Slow(tmp_path / "sync")
    config = BARRIER.config.model_copy(update={"lease": 4.0, "heartbeat": 0.1})
    plan = make_plan(tmp_path, config=config, store=store.uri)
    syncer = Syncer(plan, store=Store(store, keep_states=2), journal=Journal(tmp_path / "events.jsonl"))
    args = RegisterArgs(
        learner="east", shapes=LAYOUT.shapes(), fingerprint=LAYOUT.fingerprint, contract=contract_hash(plan),
        world_size=1,
    )  # fmt: skip
    syncer.desk.register(args)
    store.may.clear()
    syncer.start()
    try:
        wait_until(lambda: syncer.desk.status().members[0].state != "active")
    finally:
        store.may.set()
        syncer.stop()


def test_who_waits_for_a_syncer_that_ends_is_told_to_come_again(tmp_path: Path) -> None:
    """An answer at once that says nothing would be asked for again at once."""
    bench = in_folder(tmp_path)
    bench.begin()
    zeros = np.zeros(LAYOUT.total, np.float32)
    sent = bench.send("west", seq=1, base=0, delta=zeros, ema=zeros)
    assert bench.syncer.desk.commit(sent, wait_seconds=0) is None
    bench.syncer.core.stop()
    for wait in (
        lambda: bench.syncer.desk.commit(sent, wait_seconds=30),
        lambda: bench.syncer.desk.wait_version(1, wait_seconds=30),
    ):
        with pytest.raises(Refusal, match="this syncer ends") as found:
            wait()
        assert found.value.status == 503


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
