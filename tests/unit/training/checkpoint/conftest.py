"""A process group of this process alone, and a learner in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

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

    def load(self, root: Path) -> Loaded | None:
        """Take up the newest checkpoint."""
        loaded = load_latest(root, model=self.network, optimizer=self.optimizer, ema=self.ema, vectors=("anchor",))
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


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    """The writer of a learner's only rank, into `saved`."""
    one = CheckpointWriter(tmp_path / "saved", keep=2, rank=0, world_size=1, epoch=1, attempt=1, deadline_seconds=10)
    yield one
    one.close(timeout_seconds=10)
