"""The memory of contributions on their way: given back when nobody can commit them any more, and never before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage import open_bucket
from tests.builders.sync_bench import Bench
from tests.builders.sync_world import LAYOUT, ROUND_SAMPLES, ema_of, seed_weights, train
from training.sync.layout import Layout
from training.sync.messages import Contribution, LeaveArgs, RegisterArgs, SeedHeader
from training.sync.refusals import Refusal


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A barrier run of two learners; version 0 is committed."""
    one = Bench(tmp_path, open_bucket((tmp_path / "sync").as_uri()))
    one.begin()
    return one


def send(bench: Bench, name: str, *, seq: int = 1) -> Contribution:
    before = seed_weights()
    after = train(before, learner=name, cursor=seq)
    return bench.send(name, seq=seq, base=0, delta=after - before, ema=ema_of(after) - before)


def held(bench: Bench, name: str, *, generation: int = 1, seq: int = 1) -> bool:
    return bench.syncer.core.staging.holds(learner=name, generation=generation, fragment=0, seq=seq, rank=0)


def test_what_a_learner_sent_that_then_died_gives_its_memory_back(bench: Bench) -> None:
    send(bench, "west")
    bench.syncer.worker.tick()
    assert held(bench, "west"), "it lives: it may commit this"
    later = [bench.syncer.core.clock()]
    bench.syncer.core.clock = lambda: later[0]
    for _ in range(8):
        later[0] += 9.0  # less than half a lease, which would count as a pause of the syncer itself
        bench.syncer.worker.tick()
    assert bench.syncer.desk.status().members[1].state == "dead"
    assert not held(bench, "west")


def test_what_a_learner_sent_that_then_left_gives_its_memory_back(bench: Bench) -> None:
    send(bench, "west")
    bench.syncer.desk.leave(LeaveArgs(learner="west", generation=1))
    bench.syncer.worker.tick()
    assert not held(bench, "west")


def test_what_a_fenced_process_sent_gives_its_memory_back_unless_it_was_accepted(bench: Bench) -> None:
    send(bench, "west")
    accepted = send(bench, "east")
    assert bench.syncer.desk.commit(accepted, wait_seconds=0) is None
    for name in ("east", "west"):
        bench.generation[name] = bench.syncer.desk.register(bench.register(name)).generation
    bench.syncer.worker.tick()
    assert (held(bench, "west"), held(bench, "east")) == (False, True)
    assert bench.syncer.desk.commit(send(bench, "west"), wait_seconds=0) is None
    bench.syncer.worker.tick()
    assert bench.syncer.worker.work_once()
    assert bench.merges() == [1]
    members = {one.learner: one.merged_samples for one in bench.syncer.desk.status().members}
    assert members == {"east": ROUND_SAMPLES, "west": ROUND_SAMPLES}


def test_a_body_for_which_there_is_no_room_is_refused(tmp_path: Path) -> None:
    """A learner that got no answer would ask until its deadline."""
    bench = Bench(tmp_path, open_bucket((tmp_path / "sync").as_uri()))
    shapes = {"w": [2**46]}
    layout = Layout.from_shapes(shapes)
    one = RegisterArgs(
        learner="east", shapes=shapes, fingerprint=layout.fingerprint, contract=bench.register("east").contract,
        world_size=1,
    )  # fmt: skip
    generation = bench.syncer.desk.register(one).generation
    header = SeedHeader(
        learner="east", generation=generation, fingerprint=layout.fingerprint, shapes=shapes, sha256="0" * 64
    )
    with pytest.raises(Refusal, match=rf"no room for a body of {2**48} bytes") as found:
        bench.syncer.desk.reserve_seed(header)
    assert (found.value.reason, found.value.status) == ("too_large", 413)


def test_an_abandoned_seed_gives_its_memory_back(bench: Bench) -> None:
    """A second upload of the weights that came through another connection meanwhile."""
    core = bench.syncer.core
    header = SeedHeader(
        learner="east", generation=1, fingerprint=LAYOUT.fingerprint, shapes=LAYOUT.shapes(), sha256="0" * 64
    )
    slot = core.staging.reserve_seed(header, layout=LAYOUT)
    assert core.staging.find(slot.key) is slot
    bench.syncer.worker.tick()
    assert core.staging.find(slot.key) is None
    assert np.array_equal(bench.syncer.desk.weights(0)[0], seed_weights())
