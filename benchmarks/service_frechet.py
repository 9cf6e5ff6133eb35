"""Claim: the evaluation service's Frechet distance is that of a float64 computation, for any batches, shards and order.

Real images of the digits with noise are sent to the service, whole and cut into batches and shards of many sizes in
random orders, and each total is compared with the textbook formula (that of clean-fid: float64 mean and covariance of
all features at once, matrix square root). What sums in arrival order come to is measured on the same features: float32
running sums, batch by batch. Then the same for features of width 256 without the service, where both covariances are
large, and with a mean far from zero, which is where running sums lose their digits.

    python -m benchmarks.service_frechet [--orders 2]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import sqrtm

from benchmarks._services import DEADLINE_SECONDS
from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from services.client import LocalClient
from services.evaluate import EvaluateService
from services.evaluate.classifier import read_out
from services.evaluate.frechet import distance, of_sums
from services.evaluate.reference import load_splits
from services.evaluate.sums import Sums, on_grid
from services.evaluate.yardstick import make_yardstick
from services.prepare.__main__ import prepare
from services.service import ServiceContext
from services.wire.messages import AccumulateArgs, AccumulateReply, TotalArgs, TotalReply

Matrix = NDArray[np.float64]
CUTS = ((10_000, 1), (1, 1), (7, 5), (33, 2), (100, 1), (64, 8))
"""Images of a batch, and shards."""
IMAGES = 240
WIDTH, SAMPLES, FAR = 256, 1500, 30.0


def textbook(first: Matrix, second: Matrix) -> float:
    """Squared Frechet distance of two sets of [samples, width]."""
    means, covariances = zip(*((one.mean(axis=0), np.cov(one, rowvar=False)) for one in (first, second)), strict=True)
    root = np.real(cast("Matrix", sqrtm(covariances[0] @ covariances[1])))
    apart = ((means[0] - means[1]) ** 2).sum()
    return float(apart + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * np.trace(root))


def running(batches: Sequence[Matrix], second: Matrix) -> float:
    """The same from float32 sums of values and products, added up batch by batch, as metrics are wont to."""
    width = second.shape[1]
    total, products, count = np.zeros(width, np.float32), np.zeros((width, width), np.float32), 0
    for batch in (one.astype(np.float32) for one in batches):
        total, products, count = total + batch.sum(axis=0), products + batch.T @ batch, count + len(batch)
    mean = total / np.float32(count)
    covariance = ((products - np.float32(count) * np.outer(mean, mean)) / np.float32(count - 1)).astype(np.float64)
    other = np.cov(second, rowvar=False)
    root = np.real(cast("Matrix", sqrtm(covariance @ other)))
    return float(((mean - second.mean(axis=0)) ** 2).sum() + np.trace(covariance + other - 2 * root))


def cut(count: int, *, size: int, shards: int, random: np.random.Generator) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(shard, sequence, places) of every call, in random order."""
    calls = [
        (shard, sequence, places[start : start + size])
        for shard, places in enumerate(np.array_split(random.permutation(count), shards))
        for sequence, start in enumerate(range(0, len(places), size))
    ]
    return (calls[place] for place in random.permutation(len(calls)))


def through_the_service(folder: Path, *, orders: int) -> dict[str, list[float]]:
    """Errors against the reference of every cut: of the service's totals, and of running sums."""
    uri = (folder / "digits" / "manifest.json").as_uri()
    prepare(uri, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=DEADLINE_SECONDS)
    context = ServiceContext(kind="evaluate", name="judge", cache_dir=folder / "cache", manifest=uri, max_batch=64)
    client = LocalClient(EvaluateService(context))
    _, real = load_splits(uri, cache=context.cache_dir)
    random = np.random.default_rng(0)
    noise = random.normal(0, 25, real.pixels.shape)
    pixels = np.clip(np.rint(real.pixels + noise), 0, 255).astype(np.uint8)[:IMAGES]
    classifier = make_yardstick(uri, cache_dir=context.cache_dir).classifier
    features, others = (read_out(classifier, images)[0].astype(np.float64) for images in (pixels, real.pixels))
    expected = textbook(features, others)
    found: dict[str, list[float]] = {"ours": [], "running": []}
    for size, shards in CUTS:
        for order in range(orders):
            run, calls = f"cut-{size}-{shards}-{order}", list(cut(len(pixels), size=size, shards=shards, random=random))
            for shard, sequence, places in calls:
                labels = real.labels[places].tolist()
                args = AccumulateArgs(manifest=uri, labels=labels, run=run, shard=shard, sequence=sequence)
                client.call(
                    "accumulate", args, reply=AccumulateReply, tensors={"images": pixels[places]},
                    deadline_seconds=DEADLINE_SECONDS,
                )  # fmt: skip
            args = TotalArgs(manifest=uri, run=run, parts=len(calls))
            total: TotalReply = client.call("total", args, reply=TotalReply, deadline_seconds=DEADLINE_SECONDS).body
            assert total.samples == len(pixels)
            found["ours"].append(total.frechet_distance - expected)
            found["running"].append(running([features[places] for _, _, places in calls], others) - expected)
    return found


def of_wide_features(*, orders: int) -> dict[str, list[float]]:
    """The same errors on correlated features that lie off zero."""
    random = np.random.default_rng(1)
    mix = random.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH)
    first, second = (
        (random.normal(size=(SAMPLES, WIDTH)) @ mix + centre).astype(np.float32).astype(np.float64)
        for centre in (FAR, FAR + 0.1)
    )
    expected, other = textbook(first, second), of_sums(Sums.of(on_grid(second)))
    found: dict[str, list[float]] = {"ours": [], "running": []}
    for size, shards in [(SAMPLES, 1), (50, 3), (100, 1)]:
        for _ in range(orders):
            batches = [first[places] for _, _, places in cut(SAMPLES, size=size, shards=shards, random=random)]
            sums = reduce(Sums.__add__, (Sums.of(on_grid(batch)) for batch in batches))
            found["ours"].append(distance(of_sums(sums), other) - expected)
            found["running"].append(running(batches, second) - expected)
    return found


def main() -> None:
    """Measure, judge, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=2, help="random orders of each cut")
    parser.add_argument("--output", type=Path, default=RESULTS / "service_frechet.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gkr-bench-") as name:
        errors = {
            "digits through the service": through_the_service(Path(name), orders=options.orders),
            f"width {WIDTH}, mean {FAR:g}": of_wide_features(orders=options.orders),
        }
    rows: list[dict[str, object]] = []
    for what, found in errors.items():
        worst, bare = (max(map(abs, found[side])) for side in ("ours", "running"))
        against = f"float32 running sums {bare:.2g}"
        rows.append(verdict(f"Frechet distance, error, {what}", measured=worst, unit="", against=against, at_most=1e-3))
        spread, bare = (max(found[side]) - min(found[side]) for side in ("ours", "running"))
        against = f"float32 running sums {bare:.2g}"
        rows.append(verdict(f"its spread over cuts, {what}", measured=spread, unit="", against=against, at_most=0))
    write_result(options.output, {"machine": machine(), "verdicts": rows, "errors": errors})


if __name__ == "__main__":
    main()
