"""Claim: a batch of 512 px pictures costs less time and CPU through the arena than through a pipe.

Both sides are our loader; rounds alternate between them in one run. "Moved" is a batch from raw pixels, where there is
nothing to decode, so what differs is the way from worker to rank. "Decoded" is the same from JPEG, with one worker and
with two. What others do with the same pictures: `benchmarks.loader_field`; what many idle workers cost:
`benchmarks.loader_start`. Run `python -m benchmarks.loader_images`; writes benchmarks/results/loader_images.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks._pictures import make_photos
from benchmarks._verdicts import machine, verdict, write_result
from benchmarks.loader import make_dataset
from spec.shards import Shape
from spec.train import ModelConfig
from training.data import loader as loader_module
from training.data.loader import Loader

SIDE, BATCH, PREFETCH, ROUNDS, BATCHES = 512, 32, 3, 5, 6
RESULTS = Path(__file__).parent / "results" / "loader_images.json"


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        encoded = make_photos(Path(folder) / "encoded", sizes=[(688, SIDE)], count=256)
        raw = Path(folder) / "raw"
        raw.mkdir()
        pixels = make_dataset(raw, shape=Shape(SIDE, SIDE, 3), count=64)
        rows = [compare(encoded, workers=workers) for workers in (1, 2)] + [compare(pixels, workers=1, moved=True)]
    for row in rows:
        for name, one in row["sides"].items():
            print(
                f"{row['what']:8} {row['workers']} workers {name:6} {one['images_per_second']:7.1f} images/s"
                f" {one['cpu_ms_per_image']:7.2f} ms CPU per image {one['gain']:5.2f} x"
            )
    write_result(RESULTS, {"machine": machine(), "rows": rows, "verdicts": verdicts_of(rows)})


def verdicts_of(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    sides: dict[str, Any] = next(row["sides"] for row in rows if row["what"] == "moved")
    arena, pipe = sides["arena"], sides["pipe"]
    return [
        verdict(
            "512 px pixels from worker to rank through the arena", measured=arena["images_per_second"],
            unit="images/s", ratio=arena["gain"], at_least=1,
            against=f"through a pipe, {pipe['images_per_second']:.0f} images/s",
        ),
        verdict(
            "CPU of that", measured=arena["cpu_ms_per_image"], unit="ms an image", at_most=1,
            ratio=arena["cpu_ms_per_image"] / pipe["cpu_ms_per_image"],
            against=f"through a pipe, {pipe['cpu_ms_per_image']:.2f} ms",
        ),
    ]  # fmt: skip


def compare(uri: str, *, workers: int, moved: bool = False) -> dict[str, Any]:
    """All sides, round by round in turn; medians count, gains are against the last side."""
    with ExitStack() as stack:
        sides: dict[str, Callable[[], object]] = {}
        for name, least in (("arena", 0), ("pipe", 1 << 60)):
            loader = stack.enter_context(ours(uri, workers=workers, arena_least=least))
            sides[name] = partial(loader.next, 300)
        for take in sides.values():
            take()
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, take in sides.items():
                measured[name].append(cost_of(take))
        last = statistics.median(seconds for seconds, _ in measured[list(sides)[-1]])
    found = {
        name: {
            "images_per_second": BATCH / statistics.median(seconds for seconds, _ in some),
            "spread": [BATCH / max(some)[0], BATCH / min(some)[0]],
            "cpu_ms_per_image": 1000 * statistics.median(cpu for _, cpu in some) / BATCH,
            "gain": last / statistics.median(seconds for seconds, _ in some),
        }
        for name, some in measured.items()
    }
    return {"what": "moved" if moved else "decoded", "workers": workers, "sides": found}


def ours(uri: str, *, workers: int, arena_least: int = 0) -> Loader:
    loader_module.LEAST_BYTES = arena_least
    return Loader(
        uri, seed=0, learner="east", start_position=0, batch=BATCH, rank=0, world_size=1, workers=workers,
        prefetch=PREFETCH, model=ModelConfig(image_size=SIDE, channels=3), is_plain=True,
    )  # fmt: skip


def cost_of(take: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process and its children, per batch."""
    cpu, started = cpu_seconds(), time.perf_counter()
    for _ in range(BATCHES):
        take()
    return (time.perf_counter() - started) / BATCHES, (cpu_seconds() - cpu) / BATCHES


def cpu_seconds() -> float:
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        used = process.cpu_times()
        total += used.user + used.system
    return total


if __name__ == "__main__":
    main()
