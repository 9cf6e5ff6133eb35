"""Held-out samples, for validation and evaluation: never trained on, always the same ones."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec.errors import DataError
from spec.shards import Sample, Shape, open_manifest, read_samples
from storage.datasets import local_manifest
from training.data.batch import to_unit


class HeldOut(NamedTuple):
    """n samples."""

    images: NDArray[np.float32]
    """[n, C, H, W] in [-1, 1]."""
    labels: NDArray[np.int64]
    """[n]."""
    captions: list[str]


def held_out(manifest_uri: str, *, count: int, start: int = 0, cache: Path | None = None) -> HeldOut:
    """`count` samples of the test split from number `start` on; `prepare` mixes the labels evenly along the split.

    `cache`: where the split of a dataset that is not on this machine is copied to.
    """
    samples, shape = _read(manifest_uri, count=count, start=start, cache=cache)
    pixels = _contents(samples).reshape(count, shape.height, shape.width, shape.channels).transpose(0, 3, 1, 2)
    return HeldOut(
        images=to_unit(pixels),
        labels=np.array([sample.label for sample in samples], dtype=np.int64),
        captions=[sample.caption for sample in samples],
    )


def held_out_text(manifest_uri: str, *, count: int, cache: Path | None = None) -> NDArray[np.uint8]:
    """The bytes of `count` samples of text, [count, T]; `cache` as for `held_out`."""
    return _contents(_read(manifest_uri, count=count, start=0, cache=cache)[0])


def _read(manifest_uri: str, *, count: int, start: int, cache: Path | None) -> tuple[list[Sample], Shape]:
    local = local_manifest(manifest_uri, cache=cache, splits=("test",))
    manifest = open_manifest(local)
    have = manifest.count("test")
    if start + count > have:
        raise DataError(
            f"held-out samples {start}..{start + count} are asked for, the dataset has {have}",
            where=manifest_uri,
            hint=f"ask for at most {have} samples",
        )
    return list(islice(read_samples(local, split="test"), start, start + count)), manifest.shape


def _contents(samples: list[Sample]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(sample.pixels for sample in samples), dtype=np.uint8).reshape(len(samples), -1)
