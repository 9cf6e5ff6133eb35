"""Claims: the processes of a node fetch each object of a dataset once; a second start reads copies only; copies never
take more than their limit; and a shard is worth a copy from the share of it on that `training.data.fill` says.

The dataset is encoded images in a real object store (versitygw on loopback), behind a wire that counts requests. Eight
processes that start together read all of it; against each with a copy of its own, as loaders do that cache by process.
Then cold and warm starts in turns: time to the first batch, and to the last of an epoch. Four processes that use more
than the limit, while their folder is watched. And bytes per second of samples read by range, 16 requests at a time,
beside those of whole shards: where the share of a shard that is read exceeds their quotient, a copy is cheaper.
Loopback has no round trip, which ranges feel and copies do not; in a cloud the quotient is lower.

    python -m benchmarks.data_cache
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from spec.shards import Manifest, open_manifest, path_of
from spec.train import ModelConfig
from storage import Bucket, open_bucket, shard_files
from storage.cache import Cache, Wanted
from storage.datasets import local_manifest, origin_of
from storage.index import open_index
from storage.shard_files import ShardFile, ShardFiles
from storage.tar_shards import TarShards
from tests.builders.object_store import Wire, environment_for, serve_objects
from tests.builders.pictures import encoded
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.data.fill import WHOLE_SHARE
from training.data.loader import Loader

PROCESSES, TRIALS = 8, 5
PICTURES, PER_SHARD, SIDE = 240, 40, 224
BATCH = 24
SECONDS = 120.0
SPAWN = multiprocessing.get_context("spawn")


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as text, serve_objects(Path(text)) as server:
        folder = Path(text)
        here = make_pictures(folder / "pictures")
        bucket = server.open()
        for path in path_of(here).parent.iterdir():
            bucket.send(path.name, path)
        wire = Wire(server.port)
        os.environ.update(environment_for(wire.port))
        with closing(wire):
            uri = f"{bucket.uri}/manifest.json"
            shared = [together(uri, folder / f"shared-{trial}", wire=wire) for trial in range(3)]
            alone = together(uri, folder / "alone", wire=wire, each=True)
        os.environ.update(server.environment)
        starts = starting(uri, folder)
        limited = overshoot(open_manifest(here), bucket=bucket, root=folder / "limited")
        cost = ranges_and_copies(here, uri=uri, folder=folder)
    cold, warm = starts["cold_first_batch_seconds"], starts["warm_first_batch_seconds"]
    whole = starts["cold_epoch_seconds"]
    rows = [
        verdict(f"downloads of an object, {PROCESSES} processes that start together", measured=max(shared), unit="",
                against=f"{alone:g} with a cache for each", at_most=1.0),
        verdict("first batch of a warm start", measured=1000 * median(warm), unit="ms",
                against=f"a cold start's ({1000 * median(cold):.0f} ms)",
                ratio=median(warm) / median(cold), at_most=1.0),
        verdict("first batch of a cold start", measured=1000 * median(cold), unit="ms",
                against=f"fetching all shards first ({1000 * median(starts['fetch_all_seconds']):.0f} ms)",
                ratio=median(cold) / median(starts["fetch_all_seconds"])),
        verdict("an epoch, warm", measured=median(starts["warm_epoch_seconds"]), unit="s",
                against=f"cold ({median(whole):.2f} s)", ratio=median(starts["warm_epoch_seconds"]) / median(whole)),
        verdict("bytes over the limit, four processes", measured=limited["over_bytes"], unit="B",
                against=f"limit {limited['limit_bytes']} B, {limited['evicted']} evictions", at_most=0.0),
        verdict("samples by range", measured=cost["range_bytes_per_second"] / 2**20, unit="MiB/s",
                against=f"whole shards ({cost['copy_bytes_per_second'] / 2**20:.0f} MiB/s); a copy pays from this share"
                f" on, the rule says {WHOLE_SHARE}", ratio=cost["quotient"], at_most=WHOLE_SHARE),
    ]  # fmt: skip
    found = {"machine": machine(), "shared": shared, "alone": alone, "starts": starts, "limit": limited, "cost": cost}
    write_result(RESULTS / "data_cache.json", {"verdicts": rows, **found})


def make_pictures(folder: Path) -> str:
    """Noise of 224 px, so that an image has about the bytes of a photograph of twice the side."""
    rng = np.random.default_rng(1)
    pixels = [rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(PICTURES)]
    some = [Picture(encoded(one, "JPEG", quality=90), SIDE, SIDE, "jpg") for one in pixels]
    return make_tar_dataset(folder, train=some, per_shard=PER_SHARD)


def together(uri: str, root: Path, *, wire: Wire, each: bool = False) -> float:
    """Requests for the bytes of an object, per object, when all processes start at once."""
    before = len(wire.requests)
    started: list[tuple[Any, Connection]] = []
    for number in range(PROCESSES):
        ours, theirs = cast("tuple[Connection, Connection]", SPAWN.Pipe())
        process = SPAWN.Process(target=_bring_all, args=(uri, str(root / f"{number * each}"), theirs), daemon=True)
        process.start()
        started.append((process, ours))
    for _, pipe in started:
        _told(pipe)
    for _, pipe in started:
        pipe.send("go")
    for process, pipe in started:
        _told(pipe)
        process.join(SECONDS)
    asked = [line for line in wire.requests[before:] if line.startswith("GET ") and "manifest.json" not in line]
    return len(asked) / (PICTURES // PER_SHARD + 1)


def _bring_all(uri: str, root: str, pipe: Connection) -> None:
    pipe.send("ready")
    pipe.poll(SECONDS)
    local_manifest(uri, cache=Path(root))
    pipe.send("done")


def _told(pipe: Connection) -> object:
    if not pipe.poll(SECONDS):
        raise TimeoutError("a process of the benchmark says nothing")
    return pipe.recv()


def starting(uri: str, folder: Path) -> dict[str, list[float]]:
    """Cold and warm starts in turns. Shards count as large, so a cold start reads by range and copies beside."""
    found: dict[str, list[float]] = {
        f"{kind}_{what}_seconds": [] for what in ("first_batch", "epoch") for kind in ("cold", "warm")
    }
    found["fetch_all_seconds"] = []
    shard_files.WHOLE_BYTES = 0
    for trial in range(TRIALS):
        root = folder / f"start-{trial}"
        for kind in ("cold", "warm"):
            first, epoch = _epoch(uri, root)
            found[f"{kind}_first_batch_seconds"].append(first)
            found[f"{kind}_epoch_seconds"].append(epoch)
        everything = root / "all"
        found["fetch_all_seconds"].append(seconds_of(lambda to=everything: local_manifest(uri, cache=to)))
    return found


def _epoch(uri: str, root: Path) -> tuple[float, float]:
    """Seconds to the first batch, and through an epoch."""
    began = time.monotonic()
    model = ModelConfig(image_size=64, channels=3)
    with Loader(
        uri, seed=1, learner="east", start_position=0, batch=BATCH, rank=0, world_size=1, workers=0, prefetch=1,
        model=model, cache=root,
    ) as loader:  # fmt: skip
        loader.next(SECONDS)
        first = time.monotonic() - began
        for _ in range(PICTURES // BATCH - 1):
            loader.next(SECONDS)
        epoch = time.monotonic() - began
        # The next start is to be warm: what this one began to copy is brought to its end.
        local_manifest(uri, cache=root)
    return first, epoch


def overshoot(manifest: Manifest, *, bucket: Bucket, root: Path) -> dict[str, int]:
    """Four processes use shards at random in a cache that has room for all but one of them."""
    wanted = [Wanted(one.path, one.bytes, one.sha256) for one in manifest.splits.train]
    limit = sum(one.bytes for one in wanted) - min(one.bytes for one in wanted)
    cache = Cache(root, limit_bytes=limit)
    processes = [
        SPAWN.Process(target=_use, args=(str(root), wanted, bucket.uri, seed), daemon=True) for seed in range(4)
    ]
    for process in processes:
        process.start()
    most, until = 0, time.monotonic() + SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        most = max(most, cache.taken_bytes())
        threading.Event().wait(0.001)
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}")
    counts = cache.counts
    return {
        "limit_bytes": limit,
        "most_bytes": most,
        "over_bytes": max(0, most - limit),
        "evicted": counts.evicted,
        "fetched": counts.fetched,
    }


def _use(root: str, wanted: list[Wanted], uri: str, seed: int) -> None:
    cache, bucket, chance = Cache(Path(root)), open_bucket(uri), np.random.default_rng(seed)
    for number in chance.integers(0, len(wanted), 60):
        os.close(cache.hold(wanted[number], bucket=bucket))


def ranges_and_copies(here: str, *, uri: str, folder: Path) -> dict[str, float]:
    """Bytes per second of all samples by range in a random order, and of all shards whole; in turns, medians."""
    manifest = open_manifest(here)
    assert manifest.index is not None
    rows = open_index(path_of(here).parent / manifest.index.path, samples=PICTURES)
    shuffled = rows[np.random.default_rng(2).permutation(PICTURES)]
    bucket = open_bucket(uri.rpartition("/")[0])
    size = sum(one.bytes for one in manifest.splits.train)
    rates: dict[str, list[float]] = {"range": [], "copy": []}
    for trial in range(TRIALS):
        local = local_manifest(uri, cache=folder / f"ranges-{trial}", splits=())
        shards = [ShardFile("", one.samples, one.bytes, one.sha256, key=one.path) for one in manifest.splits.train]
        with closing(TarShards(ShardFiles(shards, origin=origin_of(uri, local=local)))) as tars:
            rates["range"].append(size / seconds_of(lambda tars=tars: _read_all(tars, shuffled)))
        cache = Cache(folder / f"copies-{trial}")

        wanted = [one.wanted for one in shards]
        rates["copy"].append(size / seconds_of(lambda cache=cache, wanted=wanted: _copy_all(cache, wanted, bucket)))
    by_range, whole = median(rates["range"]), median(rates["copy"])
    return {"range_bytes_per_second": by_range, "copy_bytes_per_second": whole, "quotient": by_range / whole}


def _copy_all(cache: Cache, wanted: Sequence[Wanted], bucket: Bucket) -> None:
    for one in wanted:
        os.close(cache.hold(one, bucket=bucket))


def _read_all(tars: TarShards, rows: Any) -> None:
    for start in range(0, len(rows), BATCH):
        tars.expect(rows[start : start + BATCH])
        for row in rows[start : start + BATCH]:
            tars.read(row)


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def median(values: list[float]) -> float:
    """The middle one."""
    return statistics.median(values)


if __name__ == "__main__":
    main()
