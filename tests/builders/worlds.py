"""Real ranks for tests: `python worlds.py SCENARIO FOLDER [JSON]` forks ranks that meet over gloo and run one scenario.

Torch is imported once and every rank is a fork of it, as the trainer's own agent does. Each rank writes
`<world>-<rank>.json` into FOLDER. No test waits longer than the deadline that `run_worlds` gives the script.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def run_worlds(scenario: str, folder: Path, *, deadline_seconds: float = 150, **options: Any) -> dict[str, Any]:
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

    for module in ("training.step", "training.checkpoint"):
        importlib.import_module(module)  # once here, not in every rank
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
        except BaseException:  # noqa: BLE001  # the boundary of a forked child
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed:
        raise SystemExit(f"world {label}: {len(failed)} ranks failed")


def make_learner(world_size: int, **train: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Mesh, model, optimizer, EMA and configuration of a small learner."""
    import torch

    from spec.train import ModelConfig, TrainConfig
    from training.ema import Ema
    from training.optimizer import ShardedAdamW
    from training.parallel import build_model, make_mesh

    model = ModelConfig(width=32, depth=2, heads=2, text_width=16)
    config = TrainConfig.model_validate(
        {"batch": 12, "dtype": "float32", "seed": 7, "ema_decay": 0.9, "model": model, **train}
    )
    mesh = make_mesh(world_size, shard_size=config.shard_size, device_type="cpu")
    network = build_model(config, mesh=mesh, device=torch.device("cpu"))
    return mesh, network, ShardedAdamW(network, config=config), Ema(network, decay=config.ema_decay), config


def run_steps(
    rank: int, world_size: int, *, network: Any, optimizer: Any, ema: Any, config: Any, first: int, count: int
) -> list[tuple[float, float]]:
    """Loss and gradient norm of `count` steps on data that depends on the step alone; slices may differ in size."""
    from training.step import train_step

    results: list[tuple[float, float]] = []
    edges = [round(config.batch * part / world_size) for part in range(world_size + 1)]
    own = slice(edges[rank], edges[rank + 1])
    for step in range(first, first + count):
        batch = make_batch(step, own=own, config=config)
        done = train_step(
            network, optimizer=optimizer, ema=ema, batch=batch, config=config, learning_rate=5e-3, samples=config.batch
        )
        assert done.applied
        results.append((done.loss, done.gradient_norm))
    return results


def make_batch(step: int, *, own: slice, config: Any) -> Any:
    """A slice of a random batch for the model's family. Text repeats itself, so that there is something to learn."""
    import torch

    from training.step_batch import ImageBatch, TextBatch

    draw = torch.Generator().manual_seed(step)
    size, model = config.batch, config.model
    if model.kind == "lm":
        phrase = torch.randint(97, 123, (size, 4), generator=draw)
        return TextBatch(phrase.repeat(1, model.context // 4 + 1)[own, : model.context + 1])
    shape = (size, model.channels, model.image_size, model.image_size)
    images = torch.rand(shape, generator=draw) * 2 - 1
    return ImageBatch(
        images=images[own],
        noise=torch.randn(shape, generator=draw)[own],
        time=torch.rand(size, generator=draw)[own],
        condition=torch.randn((size, model.text_width), generator=draw)[own],
        drop=(torch.rand(size, generator=draw) < 0.3)[own],
    )


WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "2x2": (4, {"shard_size": 2}),
    "1:bfloat16": (1, {"dtype": "bfloat16"}),
    "2x2:bfloat16": (4, {"shard_size": 2, "dtype": "bfloat16", "activation_checkpointing": True}),
}


def steps(folder: Path, *, worlds: list[str], count: int, **train: Any) -> None:
    """The same steps at several world sizes: losses, and what every rank holds before and after."""
    for label in worlds:
        world_size, shape = WORLDS[label]

        def work(rank: int, world_size: int = world_size, shape: dict[str, Any] = shape) -> Any:
            from training.parallel import assign_local, gather_local, is_primary_replica

            mesh, network, optimizer, ema, config = make_learner(world_size, **shape, **train)
            learner = {"network": network, "optimizer": optimizer, "ema": ema, "config": config}
            begin = gather_local(network)
            results = run_steps(rank, world_size, **learner, first=0, count=count)
            end = gather_local(network)
            assign_local(network, begin)
            assert gather_local(network).equal(begin)
            vectors = {"initial": begin, "weights": end, "ema": ema.vector}
            return {"results": results, "primary": is_primary_replica(mesh), **held(network, **vectors)}

        fork_world(label, world_size, folder, work)


def apart(folder: Path) -> None:
    """Three ranks of which the last works on another batch than the others: what each says, and if it changed."""

    def work(rank: int) -> Any:
        from spec.errors import DataError
        from training.parallel import gather_local
        from training.step import train_step

        _, network, optimizer, ema, config = make_learner(3)
        batch = make_batch(0, own=slice(4 * rank, 4 * rank + 4), config=config)
        begin = gather_local(network)
        try:
            train_step(
                network, optimizer=optimizer, ema=ema, batch=batch, config=config, learning_rate=5e-3,
                samples=config.batch, mark=2**40 - 1 - (rank == 2),
            )  # fmt: skip
        except DataError as error:
            return {"said": error.message, "changed": not gather_local(network).equal(begin)}
        return {"said": "nothing"}

    fork_world("3", 3, folder, work)


def held(network: Any, **vectors: Any) -> dict[str, Any]:
    """What a rank holds, in a form that `whole` puts together."""
    from training.parallel import flat_ranges

    own = flat_ranges(network)
    return {
        "ranges": [(one.name, one.start, one.length) for one in own],
        "shapes": {one.name: tuple(one.parameter.shape) for one in own},
        **{name: vector.tolist() for name, vector in vectors.items()},
    }


def whole(worlds: dict[str, Any], label: str, key: str) -> dict[str, np.ndarray]:
    """One vector per tensor from the primary ranks' ranges; each element must be there exactly once."""
    ranks = [value for name, value in worlds.items() if name.rpartition("-")[0] == label and value["primary"]]
    tensors = {name: np.full(int(np.prod(shape)), np.nan, np.float32) for name, shape in ranks[0]["shapes"].items()}
    for one in ranks:
        cursor, flat = 0, np.asarray(one[key], np.float32)
        for name, start, length in one["ranges"]:
            assert np.isnan(tensors[name][start : start + length]).all(), f"{name} is held twice"
            tensors[name][start : start + length] = flat[cursor : cursor + length]
            cursor += length
    assert not any(np.isnan(value).any() for value in tensors.values())
    return tensors


def checkpoints(folder: Path, *, uri: str) -> None:
    """Saved after 2 and 3 steps by 2 x 2 ranks; taken up by 4, 2 and 1, which go on; by 2 with a damaged part."""
    from storage import open_bucket
    from training.checkpoint import CheckpointWriter, load_latest
    from training.parallel import gather_local, is_primary_replica

    def save(rank: int) -> Any:
        root = open_bucket(uri)  # in each rank: a client of an object store has threads, which a fork does not keep
        mesh, network, optimizer, ema, config = make_learner(4, shard_size=2)
        learner = {"network": network, "optimizer": optimizer, "ema": ema, "config": config}
        writer = CheckpointWriter(root, keep=2, rank=rank, world_size=4, epoch=1, attempt=1, deadline_seconds=20)
        results: list[tuple[float, float]] = []
        for first, count in ((0, 2), (2, 1)):
            results += run_steps(rank, 4, **learner, first=first, count=count)
            anchor = gather_local(network) + first
            writer.save(
                step=first + count,
                model=network,
                optimizer=optimizer,
                ema=ema,
                state={"position": 12 * (first + count)},
                vectors={"anchor": anchor},
            )
        saved = held(
            network, weights=gather_local(network), exp_avg_sq=optimizer.exp_avg_sq, ema=ema.vector, anchor=anchor
        )  # fmt: skip
        results += run_steps(rank, 4, **learner, first=3, count=2)
        outcomes = [str(one) for one in writer.close(timeout_seconds=25)]
        return {"results": results, "primary": is_primary_replica(mesh), "outcomes": outcomes, **saved}

    def load(rank: int, world_size: int, shape: dict[str, Any], damage: bool = False) -> Any:
        root = open_bucket(uri)
        if damage and rank == 0:  # the others read nothing before rank 0 has chosen
            key = next(one.key for one in root.list("step-00000003") if one.key.endswith("rank-1.safetensors"))
            data = bytearray(root.get(key).data)
            data[len(data) // 2] ^= 1
            root.put(key, bytes(data))
        mesh, network, optimizer, ema, config = make_learner(world_size, **shape)
        loaded = load_latest(root, model=network, optimizer=optimizer, ema=ema, vectors=("anchor", "unknown"))
        assert loaded is not None
        vectors = {
            "weights": gather_local(network),
            "exp_avg_sq": optimizer.exp_avg_sq.clone(),
            "ema": ema.vector.clone(),
        }
        taken = held(network, **vectors, anchor=loaded.vectors["anchor"])
        results = run_steps(
            rank,
            world_size,
            network=network,
            optimizer=optimizer,
            ema=ema,
            config=config,
            first=loaded.step,
            count=5 - loaded.step,
        )
        return {
            "results": results,
            "primary": is_primary_replica(mesh),
            "step": loaded.step,
            "state": loaded.state,
            "skipped": loaded.skipped,
            "names": sorted(loaded.vectors),
            **taken,
        }

    fork_world("2x2", 4, folder, save)
    for label in ("4", "2", "1"):
        world_size, shape = WORLDS[label]
        fork_world(label, world_size, folder, functools.partial(load, world_size=world_size, shape=shape))
    fork_world("damaged", 2, folder, functools.partial(load, world_size=2, shape={}, damage=True))


def exchanges(folder: Path, *, runs: dict[str, dict[str, Any]], rounds: int) -> None:
    """For each run: learners of several worlds exchange contributions with a real syncer.

    What they contribute depends on learner, round and element alone, so the merges must not depend on the worlds. Ranks
    write `<run>:<learner>-<rank>.json`.
    """
    from spec.plan import Plan

    importlib.import_module("training.exchange")  # once here, not in every learner
    for name, options in runs.items():
        plan = Plan.read_json(Path(options["plan"]).read_text())
        children: list[int] = []
        for learner, label in options["worlds"].items():
            child = os.fork()
            if child:
                children.append(child)
                continue
            code, (world_size, shape) = 1, WORLDS[label]
            work = functools.partial(
                exchange, run=plan, control=options["control"], bulk=options["bulk"], learner=learner, shape=shape,
                world_size=world_size, rounds=rounds,
            )  # fmt: skip
            try:
                fork_world(f"{name}:{learner}", world_size, folder, work)
                code = 0
            finally:
                os._exit(code)
        failed = [child for child in children if os.waitpid(child, 0)[1]]
        if failed:
            raise SystemExit(f"run {name}: {len(failed)} learners failed")


def exchange(
    rank: int, *, run: Any, control: str, bulk: str, learner: str, shape: dict[str, Any], world_size: int, rounds: int
) -> Any:
    """One rank: digests of what it holds after each round's fragments, as rank 0 reads them back."""
    import torch

    from training.exchange import Exchange, Place
    from training.parallel import assign_part, broadcast_json, copy_part, flat_ranges, is_primary_replica
    from training.sync.adopt import FragmentState, settle
    from training.sync.client import SyncClient
    from training.sync.contract import contract_hash
    from training.sync.layout import Layout

    mesh, network, _, ema, _ = make_learner(world_size, **shape)
    config, own = run.syncer.config, flat_ranges(network)
    layout = Layout.from_shapes({one.name: tuple(one.parameter.shape) for one in own}, fragments=config.fragments)
    client = SyncClient(control, bulk=bulk, run=run.run, learner=learner, layout=layout, codec=config.codec)
    ranges = [(layout.offset(one.name) + one.start, one.length) for one in own if one.length]
    speaks = is_primary_replica(mesh)
    place = Place(learner=learner, rank=rank, speaks=speaks, ranges=ranges, device=torch.device("cpu"))
    exchange = Exchange(client, layout=layout, place=place, config=config, pending_limit=10**9)
    generation = 0
    if rank == 0:
        registration = client.register(contract_hash(run), world_size=world_size)
        generation = registration.generation
        if registration.seed_needed:
            seed = np.random.default_rng(7).standard_normal(layout.total).astype(np.float32)
            client.put_seed(seed, generation=generation, ema=seed)
        client.wait_version(0)
    generation = broadcast_json(generation)
    states = [FragmentState(base_version=0) for _ in range(layout.fragments)]
    for fragment in range(layout.fragments):
        exchange.hold(fragment, exchange.fetch(fragment, 0, renew=lambda: 0)[1])
    digests: list[str] = []
    for number in range(rounds):
        noise = np.random.default_rng([number, *learner.encode()]).standard_normal(layout.total).astype(np.float32)
        drawn = np.concatenate([noise[start : start + length] for start, length in ranges])
        for fragment in range(layout.fragments):
            cut = exchange.cut(fragment)
            moved = exchange.anchor[cut] + np.float32(1e-3) * drawn[cut]
            assign_part(network, torch.from_numpy(moved), first=cut.start)
            ema.vector[cut] = torch.from_numpy(moved)
            sent = states[fragment].ran(40).snapshot()
            exchange.snapshot(fragment, model=network, ema=ema)
            exchange.send(fragment, generation=generation, sent=sent, loss=1.0, last=False)
            exchange.take(fragment, state=sent)
            staged = exchange.result(fragment)
            assert (staged.verdict.kind, staged.action) == ("merged", "assign")
            assign_part(network, staged.change, first=cut.start)
            exchange.hold(fragment, staged.shared)
            states[fragment] = settle(sent, verdict=staged.verdict, action=staged.action)
            held = torch.empty(cut.stop - cut.start)
            copy_part(network, held, first=cut.start)
            digests.append(exchange.digest(fragment, held.numpy()))
            assert rank or digests[-1] == staged.verdict.theta_sha256
    exchange.close()
    client.close()
    return digests


if __name__ == "__main__":
    SCENARIOS: dict[str, Callable[..., None]] = {
        "steps": steps, "apart": apart, "checkpoints": checkpoints, "exchanges": exchanges
    }  # fmt: skip
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]), **json.loads(sys.argv[3]))
