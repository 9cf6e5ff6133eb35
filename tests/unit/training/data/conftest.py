"""A small dataset that is made on the spot, so that these tests need no other package than the one they test."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from spec.shards import Manifest, Sample, Shape, Shard, Splits, pack_shard, seal

SHAPE = Shape(4, 4, 1)
TRAIN, TEST, PER_SHARD = 150, 40, 64


def _write(folder: Path, *, name: str, numbers: range) -> list[Shard]:
    shards: list[Shard] = []
    for start in range(0, len(numbers), PER_SHARD):
        samples = [
            Sample(
                id=number,
                label=number % 10,
                caption=f"number {number}, é",
                pixels=np.random.default_rng(number).integers(0, 256, SHAPE.pixels, dtype=np.uint8).tobytes(),
            )
            for number in numbers[start : start + PER_SHARD]
        ]
        data = pack_shard(samples, shape=SHAPE)
        path = folder / f"{name}-{start // PER_SHARD}.shard"
        path.write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        shards.append(Shard(path=path.name, samples=len(samples), bytes=len(data), sha256=sha256))
    return shards


def make_dataset(folder: Path) -> str:
    """URI of the manifest of a new dataset: 150 training samples in 3 shards, 40 held-out ones in 1."""
    manifest = Manifest(
        name="tiny",
        source="made up",
        recipe="random pixels",
        image_height=SHAPE.height,
        image_width=SHAPE.width,
        image_channels=SHAPE.channels,
        labels=[str(label) for label in range(10)],
        splits=Splits(
            train=_write(folder, name="train", numbers=range(TRAIN)),
            test=_write(folder, name="test", numbers=range(TRAIN, TRAIN + TEST)),
        ),
    )
    path = folder / "manifest.json"
    path.write_text(seal(manifest).write_json())
    return path.as_uri()


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """A dataset of the test's own, which it may damage."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    return make_dataset(folder)
