"""Claims: encoded images of 512 pixels reach a rank faster than with torch's DataLoader at equal workers, and a batch
costs less time and CPU through the arena than through a pipe.

All sides run the same decoder on the same files, and rounds alternate between them in one run. "Decoded" is 512 px JPEG
to a uint8 batch of 32; DataLoader is used as people do, one sample per item, collated in the worker. "Moved" is the
same batch from raw pixels, where there is nothing to decode, so what differs is the way from worker to rank. Also: what
a number of idle workers costs, and that memory and descriptors do not grow. Run `python -m benchmarks.loader_images`;
writes benchmarks/results/loader_images.json.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader import make_dataset
from spec.shards import Manifest, Shape, Shard, Splits, seal
from spec.train import ModelConfig
from storage.index import ITEM, write_index
from storage.tar_shards import TarShardWriter
from training.data import loader as loader_module
from training.data.contents import Look, open_contents
from training.data.loader import Loader
from training.data.work import open_source

SIDE, BATCH, PREFETCH, ROUNDS, BATCHES, IDLE = 512, 32, 3, 5, 6, 50
RESULTS = Path(__file__).parent / "results" / "loader_images.json"


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        encoded = make_pictures(Path(folder) / "encoded")
        raw = Path(folder) / "raw"
        raw.mkdir()
        pixels = make_dataset(raw, shape=Shape(SIDE, SIDE, 3), count=64)
        rows = [compare(encoded, workers=workers) for workers in (1, 2)] + [compare(pixels, workers=1, moved=True)]
        idle = idle_workers(encoded)
    for row in rows:
        for name, one in row["sides"].items():
            print(
                f"{row['what']:8} {row['workers']} workers {name:6} {one['images_per_second']:7.1f} images/s"
                f" {one['cpu_ms_per_image']:7.2f} ms CPU per image {one['gain']:5.2f} x"
            )
    print(f"{idle['workers']} idle workers: {idle['seconds']:.2f} s, {idle['private_mb_each']:.1f} MB each")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows, "idle": idle}, indent=1) + "\n")


def compare(uri: str, *, workers: int, moved: bool = False) -> dict[str, Any]:
    """All sides, round by round in turn; medians count, gains are against the last side."""
    with ExitStack() as stack:
        sides: dict[str, Callable[[], object]] = {}
        for name, least in (("arena", 0), ("pipe", 1 << 60)):
            loader = stack.enter_context(ours(uri, workers=workers, arena_least=least))
            sides[name] = partial(loader.next, 300)
        if not moved:
            theirs = torch_batches(uri, workers=workers)
            sides["torch"] = partial(next, theirs)
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


class Pictures(Dataset[Any]):
    """One decoded image per item, by the same decoder."""

    def __init__(self, uri: str) -> None:
        self._files = open_source(uri, split="train", cache=None)[1]
        self._contents: Any = None

    def __len__(self) -> int:
        return self._files.samples

    def __getitem__(self, index: int) -> tuple[Any, int, str]:
        self._contents = self._contents or open_contents(self._files)
        out = np.empty((SIDE, SIDE, 3), dtype=np.uint8)
        known = self._contents.fill(out, index, look=Look())
        return torch.from_numpy(out), known.label, known.caption


def torch_batches(uri: str, *, workers: int) -> Iterator[Any]:
    loader = DataLoader(
        Pictures(uri), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers,
        prefetch_factor=-(-PREFETCH // workers), persistent_workers=True,
    )  # fmt: skip
    while True:
        yield from loader


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


def idle_workers(uri: str) -> dict[str, Any]:
    """Start of many workers until each has answered, and their private memory."""
    loader_module.LEAST_BYTES = 1 << 60
    started = time.perf_counter()
    with Loader(
        uri, seed=0, learner="east", start_position=0, batch=1, rank=0, world_size=1, workers=IDLE, prefetch=IDLE,
        model=ModelConfig(image_size=8, channels=3),
    ) as loader:  # fmt: skip
        for _ in range(2 * IDLE):
            loader.next(300)
        seconds = time.perf_counter() - started
        private = [psutil.Process(pid).memory_full_info().uss for pid in loader.pids]
    return {"workers": IDLE, "seconds": seconds, "private_mb_each": statistics.mean(private) / 1e6}


def make_pictures(folder: Path, *, count: int = 128) -> str:
    """JPEG files of about 640 x 576 pixels and 90 kB, smooth with some noise, as photographs are."""
    folder.mkdir()
    random, rows = np.random.default_rng(0), np.zeros(count, dtype=ITEM)
    path = folder / "train-0.tar"
    with path.open("wb") as file:
        writer = TarShardWriter(file)
        for number in range(count):
            small = Image.fromarray(random.integers(0, 256, (36, 40, 3), dtype=np.uint8))
            smooth = np.asarray(small.resize((640, 576), Image.Resampling.BICUBIC), dtype=np.int16)
            noisy = np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
            image = io.BytesIO()
            Image.fromarray(noisy).save(image, "JPEG", quality=85)
            one = writer.add(f"{number:06d}", image=image.getvalue(), ending="jpg", text={"caption": f"{number}"})
            rows[number] = (one.offset, 0, one.image_bytes, one.text_bytes, one.crc32, 640, 576)
        size = writer.finish()
    shard = Shard(path=path.name, samples=count, bytes=size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    index = Shard(
        path="index.bin", samples=count, bytes=rows.nbytes, sha256=write_index(folder / "index.bin", rows=rows)
    )
    manifest = Manifest(
        name="pictures", source="random", recipe="benchmark", image_height=576, image_width=640, image_channels=3,
        labels=[], splits=Splits(train=[shard], test=[]), format="tar", index=index,
    )  # fmt: skip
    (folder / "manifest.json").write_text(seal(manifest).write_json())
    return (folder / "manifest.json").as_uri()


if __name__ == "__main__":
    main()
