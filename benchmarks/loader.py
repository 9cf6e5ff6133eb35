"""Claim: a rank's loader delivers at least what torch's DataLoader delivers when its workers do the very same work.

Both sides call the same `Preparer` for the same positions and hand over torch tensors, so what differs is the
transport and the bookkeeping; rounds alternate between the two in one run. Two datasets: images as small as the
digits (8 x 8 grey), and images whose bytes matter (64 x 64 colour). Also: first batch of a fresh loader, and SIGKILL
of a worker until what it held is there again (DataLoader: the job dies). Run `python -m benchmarks.loader`; writes
benchmarks/results/loader.json.
"""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks._verdicts import machine, verdict, write_result
from spec.shards import Manifest, Sample, Shape, Shard, Splits, pack_shard, seal
from spec.train import ModelConfig
from training.data.loader import Loader, LocalBatch
from training.data.plan import Plan
from training.data.tickets import Ticket, as_records
from training.data.work import Delivery, Order, Planned, plan_work
from training.data.worker import Preparer

BATCH, PREFETCH, ROUNDS, SECONDS = 64, 4, 5, 1.0
RESULTS = Path(__file__).parent / "results" / "loader.json"


def main() -> None:
    """Measure, print, write."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in (("8x8x1", Shape(8, 8, 1)), ("64x64x3", Shape(64, 64, 3))):
            place = Path(folder) / name
            place.mkdir()
            uri = make_dataset(place, shape=shape)
            rows += [compare(uri, name=name, shape=shape, workers=workers) for workers in (0, 1, 2)]
        recovery = measure_recovery(uri, shape=shape)
    print(f"{'images':8} {'workers':>7} {'ours/s':>9} {'torch/s':>9} {'ratio':>6} {'first ms':>9} {'torch':>9}")
    for row in rows:
        print(
            f"{row['images']:8} {row['workers']:7d} {row['samples_per_second']:9.0f} "
            f"{row['torch_samples_per_second']:9.0f} {row['ratio']:6.2f} "
            f"{row['first_batch_ms']:9.0f} {row['torch_first_batch_ms']:9.0f}"
        )
    print(
        f"SIGKILL of a worker until its batches are there again: median {recovery['redone_ms_median']:.0f} ms,"
        f" p99 {recovery['redone_ms_p99']:.0f} ms"
    )
    write_result(RESULTS, {
        "machine": machine(), "rows": rows, "recovery": recovery, "verdicts": verdicts_of(rows, recovery=recovery),
    })  # fmt: skip


def verdicts_of(rows: list[dict[str, Any]], *, recovery: dict[str, Any]) -> list[dict[str, object]]:
    verdicts = [
        verdict(
            f"small images {row['images']}, {row['workers']} workers", measured=row["samples_per_second"],
            unit="samples/s", ratio=row["ratio"], against=f"torch DataLoader, {row['torch_samples_per_second']:.0f}",
        )
        for row in rows
        if row["workers"]
    ]  # fmt: skip
    killed = "SIGKILL of a loader worker until what it held is prepared again, p99"
    against = f"a DataLoader's job ends; median {recovery['redone_ms_median']:.0f} ms, {recovery['kills']} kills"
    redone = verdict(killed, measured=recovery["redone_ms_p99"], unit="ms", at_most=150, against=against)
    return [*verdicts, redone]


def compare(uri: str, *, name: str, shape: Shape, workers: int) -> dict[str, Any]:
    """Samples per second of both, round by round in turn; the median counts."""
    ours, theirs = our_batches(uri, shape=shape, workers=workers), torch_batches(uri, shape=shape, workers=workers)
    first, torch_first = seconds_of(lambda: next(ours)), seconds_of(lambda: next(theirs))
    rates: list[float] = []
    torch_rates: list[float] = []
    for _ in range(ROUNDS):
        rates.append(rate_of(ours))
        torch_rates.append(rate_of(theirs))
    return {
        "images": name,
        "workers": workers,
        "samples_per_second": statistics.median(rates),
        "torch_samples_per_second": statistics.median(torch_rates),
        "ratio": statistics.median(rates) / statistics.median(torch_rates),
        "spread": [min(rates), max(rates)],
        "torch_spread": [min(torch_rates), max(torch_rates)],
        "first_batch_ms": first * 1000,
        "torch_first_batch_ms": torch_first * 1000,
    }


def measure_recovery(uri: str, *, shape: Shape, kills: int = 40) -> dict[str, Any]:
    """SIGKILL of a busy worker until everything it held has been prepared again."""
    redone: list[float] = []
    with a_loader(uri, shape=shape, workers=2) as loader:
        for _ in range(kills):
            loader.next(60)
            os.kill(loader.pids[0], signal.SIGKILL)
            events = loader.worker_events()
            while not events:
                loader.next(60)
                events = loader.worker_events()
            redone += [event.redone_seconds * 1000 for event in events]
    redone.sort()
    return {
        "kills": kills,
        "redone_ms_median": statistics.median(redone),
        "redone_ms_p99": redone[int(0.99 * (len(redone) - 1))],
        "redone_ms_max": redone[-1],
    }


def our_batches(uri: str, *, shape: Shape, workers: int) -> Iterator[dict[str, Any]]:
    with a_loader(uri, shape=shape, workers=workers) as loader:
        while True:
            yield as_tensors(loader.next(60))


def torch_batches(uri: str, *, shape: Shape, workers: int) -> Iterator[dict[str, Any]]:
    loader = DataLoader(
        Positions(uri, shape=shape),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=-(-PREFETCH // workers) if workers else None,
    )
    while True:
        yield from loader


class Positions(Dataset[dict[str, Any]]):
    """The same work as a torch dataset: one item is one whole batch, prepared by the same code."""

    def __init__(self, uri: str, *, shape: Shape) -> None:
        self._uri, self._shape = uri, shape
        self._ready: tuple[Plan, Preparer] | None = None

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._ready is None:
            planned = planned_of(self._uri, shape=self._shape)
            self._ready = planned.plan, Preparer(planned.work)
        plan, preparer = self._ready
        position = index * BATCH
        ticket = Ticket(position, position, 0, as_records(plan.batch(position).refs))
        return as_tensors(preparer.prepare(ticket).batch(ticket))


def as_tensors(batch: LocalBatch) -> dict[str, Any]:
    """What a trainer makes of a batch."""
    names = ("images", "labels", "noise", "time", "drop")
    tensors: dict[str, Any] = {name: torch.from_numpy(getattr(batch, name)) for name in names}
    return tensors | {"captions": batch.captions, "ids": batch.ids}


def a_loader(uri: str, *, shape: Shape, workers: int) -> Loader:
    return Loader(
        uri, seed=0, learner="east", start_position=0, batch=BATCH, rank=0, world_size=1, workers=workers,
        prefetch=PREFETCH, model=ModelConfig(image_size=shape.height, channels=shape.channels),
    )  # fmt: skip


def planned_of(uri: str, *, shape: Shape) -> Planned:
    model = ModelConfig(image_size=shape.height, channels=shape.channels)
    return plan_work(Order([uri], 0, "east", BATCH), delivery=Delivery(model), world_size=1, cache=None)


def make_dataset(folder: Path, *, shape: Shape, count: int = 1024) -> str:
    """Random images in four shards."""
    random = np.random.default_rng(0)
    shards: list[Shard] = []
    for start in range(0, count, count // 4):
        samples = [
            Sample(number, number % 10, f"a picture of number {number}", random.bytes(shape.pixels))
            for number in range(start, start + count // 4)
        ]
        data = pack_shard(samples, shape=shape)
        path = folder / f"train-{start}.shard"
        path.write_bytes(data)
        shards.append(
            Shard(path=path.name, samples=len(samples), bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        )
    manifest = Manifest(
        name="random", source="random", recipe="benchmark", image_height=shape.height, image_width=shape.width,
        image_channels=shape.channels, labels=[str(one) for one in range(10)], splits=Splits(train=shards, test=[]),
    )  # fmt: skip
    path = folder / "manifest.json"
    path.write_text(seal(manifest).write_json())
    return path.as_uri()


def rate_of(batches: Iterator[dict[str, Any]]) -> float:
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        count += len(next(batches)["ids"])
    return count / (time.perf_counter() - started)


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
