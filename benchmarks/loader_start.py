"""Claim: 400 loader workers start within 8 s and 5 GB; a run resumes at sample 10^9 of 2 x 10^9 within 2 s.

Workers: those of one rank that has torch, from nothing until each has answered, with their private memory; they have no
connection to anything, so none to Ray's control service. Beside them, in the same run, Ray actors that import torch
(fewer, scaled up: 400 do not fit) and plain forks. Resume: from a fresh loader to its first batch, with the forkserver.
The dataset has a manifest of 20,000 shards and an index of 56 GB. Its files are links to one shard of 64 pictures, and
only those rows of the index are written that are read; the rest of it is a hole. Beside it, DataLoaders that skip:
measured for some thousand samples, and shown to be linear. Plan: one window of 2^18 samples in 40 buckets.

    python -m benchmarks.loader_start [--workers 400] [--actors 20] [--without-ray]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks._pictures import make_photos
from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from benchmarks.loader import make_dataset
from spec.shards import Shape, Shard, Splits, open_manifest, path_of, seal
from spec.train import ModelConfig
from storage.index import ITEM
from training.data.contents import Look, open_contents
from training.data.loader import Loader
from training.data.mixture import Mixture, Segment
from training.data.plan import Plan, Source
from training.data.work import Delivery, Order, open_source, plan_work
from training.preflight.collect import memory

OUTPUT = RESULTS / "loader_start.json"
LEAST_FREE_BYTES = 8 << 30
SAMPLES, AT, PER_SHARD = 2 * 10**9, 10**9, 100_000
BATCH, SIDE, AHEAD = 32, 64, 4
MODEL = ModelConfig(image_size=SIDE, channels=3)
SKIPPED = (1024, 2048, 4096)


def many_workers(uri: str, *, count: int) -> dict[str, Any]:
    """From nothing until each of a rank's workers has answered."""
    began = time.perf_counter()
    with Loader(
        uri, seed=0, learner="east", start_position=0, batch=1, rank=0, world_size=1, workers=count, prefetch=count,
        model=ModelConfig(image_size=8, channels=1),
    ) as loader:  # fmt: skip
        for _ in range(count):
            loader.next(300)
        seconds = time.perf_counter() - began
        tree = [psutil.Process(pid) for pid in {*loader.pids, *(psutil.Process(pid).ppid() for pid in loader.pids)}]
        return {
            "count": count,
            "seconds": seconds,
            "private_bytes": sum(one.memory_full_info().uss for one in tree),
            "connections": sum(len(one.net_connections(kind="inet")) for one in (psutil.Process(), *tree)),
            "has_torch": torch.__version__,
        }


def many_forks(count: int) -> dict[str, Any]:
    """The floor: forks of this process that answer once."""
    context = multiprocessing.get_context("fork")
    answers, until = context.SimpleQueue(), context.Event()
    began = time.perf_counter()
    some = [context.Process(target=_answer, args=(answers, until), daemon=True) for _ in range(count)]
    for one in some:
        one.start()
    for _ in some:
        answers.get()
    found = {
        "count": count,
        "seconds": time.perf_counter() - began,
        "private_bytes": _private([one.pid for one in some]),
    }
    until.set()
    for one in some:
        one.join(30)
    return found


def _answer(answers: Any, until: Any) -> None:
    answers.put(os.getpid())
    until.wait(300)


def many_actors(count: int) -> dict[str, Any]:
    """A fresh Ray's actors, each of which imports torch; from the first call until all have answered."""
    import ray

    class Idle:
        def __init__(self) -> None:
            import torch as _  # noqa: F401

        def pid(self) -> int:
            return os.getpid()

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 28, log_to_driver=False)
    try:
        began = time.perf_counter()
        remote: Any = ray.remote(num_cpus=0)(Idle)
        actors = [remote.remote() for _ in range(count)]
        pids = ray.get([one.pid.remote() for one in actors], timeout=600)
        return {"count": count, "seconds": time.perf_counter() - began, "private_bytes": _private(pids)}
    finally:
        ray.shutdown()


def _private(pids: Sequence[int | None]) -> int:
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


def resume(folder: Path) -> dict[str, Any]:
    """A fresh loader in the middle of the large dataset, until its first batch; the median of three."""
    uri = make_large(folder)
    seconds: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        with Loader(
            uri, seed=0, learner="east", start_position=AT, batch=BATCH, rank=0, world_size=1, workers=2,
            prefetch=AHEAD, model=MODEL, cache=folder / "cache",
        ) as loader:  # fmt: skip
            batch = loader.next(60)
            seconds.append(time.perf_counter() - began)
            assert (batch.position, len(batch.ids)) == (AT, BATCH)
    return {"samples": SAMPLES, "at": AT, "seconds": statistics.median(seconds), "all_seconds": seconds}


def make_large(folder: Path) -> str:
    """URI of a dataset of SAMPLES samples, of which those that a loader reads at AT are there."""
    small = path_of(make_photos(folder / "small", sizes=[(SIDE, SIDE)], count=64))
    rows = np.fromfile(small.parent / "index.bin", dtype=ITEM)
    shard = small.parent / "train-0000.tar"
    sha256, size = hashlib.sha256(shard.read_bytes()).hexdigest(), shard.stat().st_size
    large = folder / "large"
    large.mkdir()
    names = [f"train-{number:05d}.tar" for number in range(SAMPLES // PER_SHARD)]
    for name in names:
        os.link(shard, large / name)
    with (large / "index.bin").open("wb") as file:
        file.truncate(SAMPLES * ITEM.itemsize)
    manifest = open_manifest(small.as_uri()).model_copy(update={
        "splits": Splits(
            train=[Shard(path=name, samples=PER_SHARD, bytes=size, sha256=sha256) for name in names], test=[]
        ),
        "index": Shard(path="index.bin", samples=SAMPLES, bytes=SAMPLES * ITEM.itemsize, sha256="0" * 64),
        "digest": "",
    })  # fmt: skip
    path = large / "manifest.json"
    path.write_text(seal(manifest).write_json())
    order = Order([path.as_uri()], 0, "east", BATCH)
    plan = plan_work(order, delivery=Delivery(MODEL), world_size=1, cache=folder / "cache").plan
    index = np.memmap(large / "index.bin", dtype=ITEM, mode="r+", shape=(SAMPLES,))
    for number in range(2 * AHEAD + 2):
        for sample in plan.batch(AT + number * BATCH).refs.sample.tolist():
            row = rows[sample % len(rows)].copy()
            row["shard"] = sample // PER_SHARD
            index[sample] = row
    index.flush()
    return path.as_uri()


class Pictures(Dataset[Any]):
    """One decoded picture per item, by our decoder."""

    def __init__(self, uri: str) -> None:
        self._contents = open_contents(open_source(uri, split="train", cache=None)[1])

    def __len__(self) -> int:
        return SKIPPED[-1] * 4

    def __getitem__(self, index: int) -> Any:
        out = np.empty((SIDE, SIDE, 3), dtype=np.uint8)
        self._contents.fill(out, index % 64, look=Look())
        return torch.from_numpy(out)


def skip(uri: str) -> dict[str, Any]:
    """CPU time of a loader that goes to a place by reading what comes before it, for some places."""
    seconds: list[float] = []
    for count in SKIPPED:
        batches = iter(DataLoader(Pictures(uri), batch_size=BATCH))
        next(batches)
        began = time.process_time()
        for _ in itertools.islice(batches, count // BATCH):
            pass
        seconds.append(time.process_time() - began)
    slope, begin = np.polyfit(SKIPPED, seconds, 1)
    return {
        "skipped": list(SKIPPED),
        "all_cpu_seconds": seconds,
        "correlation": float(np.corrcoef(SKIPPED, seconds)[0, 1]),
        "cpu_seconds_per_sample": float(slope),
        "hours_to_there": float(begin + slope * AT) / 3600,
    }


def plan_window(buckets: int = 40, *, batch: int = 64, samples: int = 10**8) -> dict[str, Any]:
    """Time of one window, CPU and wall; a window of its own each time."""
    table = np.random.default_rng(0).integers(0, buckets, samples, dtype=np.uint8)
    wall: list[float] = []
    cpu: list[float] = []
    for seed in range(5):
        plan = Plan(
            [Source("pictures", samples, table)], mixture=Mixture([Segment(0, (1,))]), seed=seed, learner="east",
            batches=[batch] * buckets,
        )  # fmt: skip
        began, busy = time.perf_counter(), time.process_time()
        plan.batch(0)
        wall.append(1000 * (time.perf_counter() - began))
        cpu.append(1000 * (time.process_time() - busy))
    return {"buckets": buckets, "ms": statistics.median(wall), "cpu_ms": statistics.median(cpu), "all_ms": wall}


def verdicts_of(found: dict[str, Any]) -> list[dict[str, object]]:
    workers, forks, at, skipped = found["workers"], found["forks"], found["resume"], found["skip"]
    count = workers["count"]
    rows = [
        verdict(
            "first batch of a loader at sample 10^9 of 2 x 10^9", measured=at["seconds"], unit="s", at_most=2,
            against=f"a DataLoader that skips needs {skipped['hours_to_there']:.0f} h of CPU by its slope",
        ),
        verdict("plan of a window of 2^18 samples, 40 buckets", measured=found["plan"]["ms"], unit="ms", at_most=100),
    ]  # fmt: skip
    if "skipped" in workers:
        return [verdict(f"loader workers: not measured, {workers['skipped']}", measured=float("nan"), unit=""), *rows]
    rows += [
        verdict(
            f"{count} loader workers of a rank that has torch", measured=workers["seconds"], unit="s", at_most=8,
            against=f"plain forks {forks['seconds']:.1f} s",
        ),
        verdict(f"memory of {count} loader workers", measured=workers["private_bytes"] / 1e9, unit="GB", at_most=5),
        verdict("connections of a rank and its loader workers (calls to Ray's control service need one)",
                measured=workers["connections"], unit="", at_most=0),
    ]  # fmt: skip
    if actors := found["actors"]:
        each, its = workers["seconds"] / count, actors["seconds"] / actors["count"]
        mine, his = workers["private_bytes"] / count, actors["private_bytes"] / actors["count"]
        against = f"times quicker than a Ray actor that imports torch ({actors['count']} of them)"
        rows += [
            verdict("start of a loader worker", measured=1000 * each, unit="ms", ratio=its / each, against=against),
            verdict("private memory of a loader worker", measured=mine / 1e6, unit="MB", ratio=his / mine,
                    against="times less than that actor"),
        ]  # fmt: skip
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=400)
    parser.add_argument("--actors", type=int, default=20)
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="gkr-bench-") as temporary:
        folder = Path(temporary)
        found["resume"] = resume(folder)
        found["skip"] = skip((folder / "small" / "manifest.json").as_uri())
        found["plan"] = plan_window()
        available = memory().available_bytes
        if available is not None and available < LEAST_FREE_BYTES:
            found["workers"] = {"count": 0, "skipped": f"{available >> 30} GiB of memory are free, 8 are needed"}
            found["forks"] = found["actors"] = None
        else:
            (folder / "raw").mkdir()
            uri = make_dataset(folder / "raw", shape=Shape(8, 8, 1))
            found["workers"] = many_workers(uri, count=given.workers)
            found["forks"] = many_forks(given.workers)
            found["actors"] = None if given.without_ray else many_actors(given.actors)
    write_result(given.output, {**found, "verdicts": verdicts_of(found)})


if __name__ == "__main__":
    main()
