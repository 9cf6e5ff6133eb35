"""Real ranks for tests: `python worlds.py SCENARIO FOLDER [JSON]` forks ranks that meet over gloo and run one scenario.

Torch is imported once and every rank is a fork of it, as the trainer's own agent does. Each rank writes `<world>-<rank>.json` into FOLDER.
No test waits longer than the deadline that `run_worlds` gives the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_worlds(scenario: str, folder: Path, *, deadline_seconds: float = 60, **options: Any) -> dict[str, Any]:
    """What each rank returned, by `<world label>-<rank>`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, scenario, str(folder), json.dumps(options)]
    done = subprocess.run(
        command, env=environment, timeout=deadline_seconds, check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))}


def fork_world(label: str, world_size: int, folder: Path, work: Callable[[int], Any]) -> None:
    """Run `work(rank)` in `world_size` forked ranks of one process group and wait for all."""
    import torch

    from training.parallel import close_process_group, init_process_group

    children: list[int] = []
    for rank in range(world_size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            torch.set_num_threads(1)
            init_process_group(
                rank,
                world_size=world_size,
                init_method=f"file://{folder}/{label}.store",
                device=torch.device("cpu"),
                timeout_seconds=30,
            )
            (folder / f"{label}-{rank}.json").write_text(json.dumps(work(rank)))
            close_process_group()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed:
        raise SystemExit(f"world {label}: {len(failed)} ranks failed")


def make_learner(
    world_size: int, *, shard_size: int | None = None, dtype: str = "float32", batch: int = 12, **model: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Mesh, model, optimizer, EMA and configuration of a small learner."""
    import torch

    from spec.train import ModelConfig, TrainConfig
    from training.ema import Ema
    from training.optimizer import ShardedAdamW
    from training.parallel import build_model, make_mesh

    shape: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2, "text_width": 16, **model}
    config = TrainConfig.model_validate(
        {"batch": batch, "dtype": dtype, "shard_size": shard_size, "seed": 7, "model": ModelConfig.model_validate(shape)}
    )
    mesh = make_mesh(world_size, shard_size=shard_size, device_type="cpu")
    network = build_model(config, mesh=mesh, device=torch.device("cpu"))
    return mesh, network, ShardedAdamW(network, config=config), Ema(network, decay=0.9), config


def run_steps(
    rank: int, world_size: int, *, network: Any, optimizer: Any, ema: Any, config: Any, first: int, count: int
) -> list[tuple[float, float]]:
    """Loss and gradient norm of `count` steps on data that depends on the step alone; slices differ in size where they must."""
    import torch

    from training.step import StepBatch, train_step

    results: list[tuple[float, float]] = []
    edges = [round(config.batch * part / world_size) for part in range(world_size + 1)]
    own = slice(edges[rank], edges[rank + 1])
    for step in range(first, first + count):
        draw = torch.Generator().manual_seed(step)
        size, model = config.batch, config.model
        shape = (size, model.channels, model.image_size, model.image_size)
        images = torch.rand(shape, generator=draw) * 2 - 1
        batch = StepBatch(
            images=images[own],
            noise=torch.randn(shape, generator=draw)[own],
            time=torch.rand(size, generator=draw)[own],
            condition=torch.randn((size, model.text_width), generator=draw)[own],
            drop=(torch.rand(size, generator=draw) < 0.3)[own],
        )
        done = train_step(network, optimizer=optimizer, ema=ema, batch=batch, config=config, learning_rate=5e-3)
        assert done.applied
        results.append((done.loss, done.gradient_norm))
    return results


WORLDS = {"1": (1, None), "2": (2, None), "4": (4, None), "2x2": (4, 2)}


def steps(folder: Path, *, worlds: list[str], count: int = 10, batch: int = 12, dtype: str = "float32", **options: Any) -> None:
    """Losses of the same steps at several world sizes; and what the flat ranges of all ranks make together."""
    for label in worlds:
        world_size, shard_size = WORLDS[label]

        def work(rank: int, world_size: int = world_size, shard_size: int | None = shard_size) -> Any:
            import time

            from training.parallel import assign_local, flat_ranges, gather_local, is_primary_replica

            mesh, network, optimizer, ema, config = make_learner(
                world_size, shard_size=shard_size, dtype=dtype, batch=batch, **options
            )
            begin = gather_local(network)
            results = run_steps(
                rank, world_size, network=network, optimizer=optimizer, ema=ema, config=config, first=0, count=1
            )
            started = time.monotonic()
            results += run_steps(
                rank, world_size, network=network, optimizer=optimizer, ema=ema, config=config, first=1, count=count - 1
            )
            seconds = time.monotonic() - started
            flat = gather_local(network)
            assert not flat.equal(begin)
            assign_local(network, begin)
            assert gather_local(network).equal(begin)
            return {
                "results": results,
                "primary": is_primary_replica(mesh),
                "ranges": [(one.name, one.start, one.length) for one in flat_ranges(network)],
                "shapes": {name: tuple(value.shape) for name, value in network.named_parameters()},
                "weights": flat.tolist(),
                "initial": begin.tolist(),
                "ema": ema.vector.tolist(),
                "seconds": seconds,
            }

        fork_world(label, world_size, folder, work)


if __name__ == "__main__":
    SCENARIOS: dict[str, Callable[..., None]] = {"steps": steps}
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]), **json.loads(sys.argv[3]))
