"""What a worker is made of: little, and nothing random that is not keyed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from numpy.random import Generator, Philox

from spec.train import ModelConfig
from training.data.plan import Refs
from training.data.tickets import Ticket, as_records
from training.data.work import Delivery, Order, plan_work
from training.data.worker import Preparer


def a_preparer(dataset: str) -> Preparer:
    model = ModelConfig(image_size=4, channels=1, condition_dropout=0.5)
    order = Order([dataset], seed=0, learner="east", batch=4)
    return Preparer(plan_work(order, delivery=Delivery(model), world_size=1, cache=None).work)


def ticket(position: int) -> Ticket:
    """Four samples."""
    one = np.zeros(4, dtype=np.int64)
    return Ticket(position, position, 0, as_records(Refs(one, np.arange(4) + position % 100, one)))


def test_the_forkserver_loads_no_torch_and_no_pydantic() -> None:
    code = "import sys, training.data.preload; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "pydantic", "ray", "zmq", "msgspec", "scipy"} & set(loaded.split())


def test_each_position_has_a_stream_of_its_own_that_numpy_alone_can_reproduce(dataset: str) -> None:
    """Guards the trick of setting the counter of one generator: it must equal a new generator for each position."""
    preparer = a_preparer(dataset)
    batch = preparer.prepare(ticket(1000)).batch(ticket(1000))
    key = preparer._positions._philox.state["state"]["key"]
    for row in range(4):
        fresh = Generator(Philox(key=key, counter=[0, 0, 1000 + row, 0]))
        assert batch.time[row] == fresh.random(dtype=np.float32)
        assert batch.drop[row] == (fresh.random() < 0.5)
        assert np.array_equal(batch.noise[row], fresh.standard_normal((1, 4, 4), dtype=np.float32))


def test_preparing_again_gives_the_same_whatever_was_prepared_before(dataset: str) -> None:
    preparer = a_preparer(dataset)
    first = preparer.prepare(ticket(40)).batch(ticket(40))
    preparer.prepare(ticket(7))
    again = preparer.prepare(ticket(40)).batch(ticket(40))
    assert first.noise.tobytes() == again.noise.tobytes()
    assert first.time.tobytes() == again.time.tobytes()
