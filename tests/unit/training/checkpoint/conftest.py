"""A process group of this process alone, and a learner in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from storage import Bucket, open_bucket
from tests.builders.object_store import ObjectServer, serve_objects
from tests.builders.worlds import make_learner, run_steps
from training.checkpoint import CheckpointWriter, Loaded, load_latest
from training.ema import Ema
from training.optimizer import ShardedAdamW
from training.parallel import close_process_group, gather_local, init_process_group


@dataclass
class Learner:
    """One rank that trains, saves and loads."""

    network: Any
    optimizer: ShardedAdamW
    ema: Ema
    config: Any
    steps: int = 0

    def train(self, count: int) -> list[tuple[float, float]]:
        """The next steps' losses and gradient norms."""
        self.steps += count
        return run_steps(
            0,
            1,
            network=self.network,
            optimizer=self.optimizer,
            ema=self.ema,
            config=self.config,
            first=self.steps - count,
            count=count,
        )

    def save(self, writer: CheckpointWriter) -> None:
        """Start saving the state as it is."""
        writer.save(
            step=self.steps,
            model=self.network,
            optimizer=self.optimizer,
            ema=self.ema,
            state={"position": 12 * self.steps, "rounds": {"seq": 3}},
            vectors={"anchor": gather_local(self.network) * 2},
        )

    def load(self, bucket: Bucket) -> Loaded | None:
        """Take up the newest checkpoint."""
        loaded = load_latest(bucket, model=self.network, optimizer=self.optimizer, ema=self.ema, vectors=("anchor",))
        self.steps = loaded.step if loaded else self.steps
        return loaded

    def everything(self) -> torch.Tensor:
        """All state in one vector."""
        parts = (gather_local(self.network), self.optimizer.exp_avg, self.optimizer.exp_avg_sq, self.ema.vector)
        return torch.cat(parts)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    """Fresh learners with options of the training configuration."""
    init_process_group(
        0, world_size=1, init_method=f"file://{tmp_path}/store", device=torch.device("cpu"), timeout_seconds=20
    )

    def fresh(**train: Any) -> Learner:
        _, network, optimizer, ema, config = make_learner(1, **train)
        return Learner(network=network, optimizer=optimizer, ema=ema, config=config)

    yield fresh
    close_process_group()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One object store for all tests here."""
    with serve_objects(tmp_path_factory.mktemp("store")) as one:
        yield one


@pytest.fixture(params=["folder", "objects"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """Where a learner saves, in a store of each kind."""
    if request.param == "folder":
        return open_bucket((tmp_path / "saved").as_uri())
    find: Callable[[str], ObjectServer] = request.getfixturevalue
    return find("server").open()


@pytest.fixture
def writer(saved: Bucket) -> Iterator[CheckpointWriter]:
    """The writer of a learner's only rank, into `saved`."""
    one = CheckpointWriter(saved, keep=2, rank=0, world_size=1, epoch=1, attempt=1, deadline_seconds=10)
    yield one
    one.close(timeout_seconds=10)


def names(bucket: Bucket, prefix: str = "") -> list[str]:
    """Keys of all objects, without their folder."""
    return [entry.key.removeprefix(f"{prefix}/") for entry in bucket.list(prefix)]


def flip(bucket: Bucket, key: str, *, place: int | None = None) -> None:
    """Damage one bit."""
    data = bytearray(bucket.get(key).data)
    data[len(data) // 2 if place is None else place] ^= 16
    bucket.put(key, bytes(data))


def truncate(bucket: Bucket, key: str, *, by: int) -> None:
    """Take the end away."""
    bucket.put(key, bucket.get(key).data[:-by])
