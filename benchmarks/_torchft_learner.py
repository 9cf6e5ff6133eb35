"""One replica of torchft's DiLoCo on the same task as ours: `python _torchft_learner.py TASK.json REPLICA`.

Runs in the throw-away environment that has torchft. Network, data order, learning rate and validation are this
project's; quorum, averaging, outer step and recovery are torchft's. Appends lines to `torchft-<replica>.jsonl`. No
replica asks for a quorum before all have been started once, so that none trains alone at first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]
from torchft.manager import Manager  # pyright: ignore[reportMissingImports]
from torchft.process_group import ProcessGroupGloo  # pyright: ignore[reportMissingImports]

from spec.sync import SyncConfig
from spec.train import TrainConfig
from training.data.loader import Loader
from training.models.families import make_network
from training.models.network import initialise
from training.optimizer import learning_rate
from training.step_batch import to_device
from training.validation import SAMPLES, held_out_batch

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)


def main() -> None:
    """Train until the group has committed the budget, then report the loss of the shared weights."""
    task, replica = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    train, sync = TrainConfig.model_validate(task["train"]), SyncConfig.model_validate(task["sync"])
    out = Path(sys.argv[1]).with_name(f"torchft-{replica}.jsonl").open("a", buffering=1)

    def say(**fields: Any) -> None:
        out.write(json.dumps({"time": time.time(), "replica": replica, "pid": os.getpid(), **fields}) + "\n")

    network = initialise(make_network(train.model), seed=train.seed)
    inner = torch.optim.AdamW(groups(network, decay=train.weight_decay), lr=train.learning_rate, betas=train.betas)
    outer = torch.optim.SGD(
        network.parameters(), lr=sync.outer_learning_rate, momentum=sync.outer_momentum, nesterov=True
    )
    await_all(Path(sys.argv[1]).parent, replica, of=len(task["names"]))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=1, use_async_quorum=False, timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60), rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=task["lighthouse"], replica_id=f"replica{replica}", hostname="127.0.0.1",
        load_state_dict=load_state,
        state_dict=lambda: {
            "model": network.state_dict(), "inner": inner.state_dict(), "outer": outer.state_dict(),
        },
    )  # fmt: skip
    marks = {"before": 0.0, "blocked": 0.0}

    # Blocked time is what torchft's own hook takes behind the optimizer's step; these two lie around it.
    def before(*_: Any) -> None:
        marks["before"] = time.monotonic()

    def behind(*_: Any) -> None:
        marks["blocked"] += time.monotonic() - marks["before"]

    inner.register_step_post_hook(before)
    with DiLoCo(manager, [network], inner, outer, sync_every=sync.inner_steps, pin_memory=False):
        inner.register_step_post_hook(behind)
        loop(task, train, sync, network=network, inner=inner, manager=manager, replica=replica, say=say, marks=marks)
    say(kind="final", loss=validation(task["manifest"], train=train, network=network),
        committed=manager.batches_committed(), blocked=marks["blocked"])  # fmt: skip
    manager.shutdown(wait=False)


def await_all(folder: Path, replica: int, *, of: int) -> None:
    """Return when each replica has come here once."""
    (folder / f"ready-{replica}").touch()
    until = time.monotonic() + 120
    while len(list(folder.glob("ready-*"))) < of:
        assert time.monotonic() < until, "another replica did not start"
        time.sleep(0.05)


def loop(
    task: dict[str, Any], train: TrainConfig, sync: SyncConfig, *, network: nn.Module, inner: torch.optim.Optimizer,
    manager: Any, replica: int, say: Any, marks: dict[str, float],
) -> None:  # fmt: skip
    """Steps until enough rounds of replicas are committed."""
    wanted, learners = train.samples // (sync.inner_steps * train.batch), len(task["names"])
    loader, committed, local = None, -1, 0
    while manager.batches_committed() < wanted:
        if loader is None:
            start = manager.current_step() * sync.inner_steps * train.batch
            loader = Loader(
                task["manifest"], seed=train.seed, learner=task["names"][replica], start_position=start,
                batch=train.batch, rank=0, world_size=1, workers=0, prefetch=1, model=train.model,
            )  # fmt: skip
        seen = manager.batches_committed() * sync.inner_steps * train.batch + local * learners * train.batch
        for group in inner.param_groups:
            group["lr"] = learning_rate(train, samples=seen)
        inner.zero_grad()
        loss = to_device(loader.next(30), embeddings=None, device=CPU).losses(network).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), train.gradient_clip)
        inner.step()
        local += 1
        if manager.batches_committed() != committed:
            committed, local = manager.batches_committed(), 0
        say(
            kind="step", loss=loss.item(), committed=committed, blocked=marks["blocked"], lr=inner.param_groups[0]["lr"]
        )


def groups(network: nn.Module, *, decay: float) -> list[dict[str, Any]]:
    """Decay on matrices only, as our optimizer does it."""
    parameters = list(network.parameters())
    return [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def validation(manifest: str, *, train: TrainConfig, network: nn.Module) -> float:
    """The same held-out batch that our learners report."""
    batch = held_out_batch(manifest, count=SAMPLES, own=slice(None), train=train, conditions=None, device=CPU)
    return float(batch.losses(network).double().mean())


if __name__ == "__main__":
    main()
