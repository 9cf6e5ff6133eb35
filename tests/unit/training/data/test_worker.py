"""What a worker is made of: little, and nothing random that is not keyed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from numpy.random import Generator, Philox

from spec.shards import open_manifest, path_of
from training.data.reader import shard_files
from training.data.worker import Preparer, Work


def a_work(dataset: str) -> Work:
    manifest = open_manifest(dataset)
    shards = [(one.path, one.samples, one.bytes, one.sha256) for one in manifest.splits.train]
    return Work(
        shards=shard_files(path_of(dataset).parent, shards),
        shape=manifest.shape,
        manifest_digest=manifest.digest,
        seed=0,
        learner="east",
        batch=4,
        first=0,
        count=4,
        condition_dropout=0.5,
        time_distribution="uniform",
    )


def test_the_forkserver_loads_no_torch_and_no_pydantic() -> None:
    code = "import sys, training.data.preload; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "pydantic", "ray", "zmq", "msgspec", "scipy"} & set(loaded.split())


def test_each_position_has_a_stream_of_its_own_that_numpy_alone_can_reproduce(dataset: str) -> None:
    """Guards the trick of setting the counter of one generator: it must equal a new generator for each position."""
    preparer = Preparer(a_work(dataset))
    batch = preparer.prepare(1000)
    key = preparer._philox.state["state"]["key"]
    for row in range(4):
        fresh = Generator(Philox(key=key, counter=[0, 0, 1000 + row, 0]))
        assert batch.time[row] == fresh.random(dtype=np.float32)
        assert batch.drop[row] == (fresh.random() < 0.5)
        assert np.array_equal(batch.noise[row], fresh.standard_normal((1, 4, 4), dtype=np.float32))


def test_preparing_again_gives_the_same_whatever_was_prepared_before(dataset: str) -> None:
    preparer = Preparer(a_work(dataset))
    first = preparer.prepare(40)
    preparer.prepare(7)
    again = preparer.prepare(40)
    assert first.noise.tobytes() == again.noise.tobytes()
    assert first.time.tobytes() == again.time.tobytes()
