"""Held-out samples, for validation and evaluation: never trained on, always the same ones."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec.errors import DataError
from spec.shards import Sample, open_manifest, read_samples
from storage.datasets import local_manifest, read_manifest
from training.data.batch import to_unit
from training.data.contents import fill_usable, open_contents
from training.data.work import open_source


class HeldOut(NamedTuple):
    """n samples."""

    images: NDArray[np.float32]
    """[n, C, H, W] in [-1, 1]."""
    labels: NDArray[np.int64]
    """[n]."""
    captions: list[str]


def held_out(
    manifest_uri: str,
    *,
    count: int,
    start: int = 0,
    cache: Path | None = None,
    shape: tuple[int, int, int] | None = None,
) -> HeldOut:
    """`count` samples of the test split from number `start` on; `prepare` mixes the labels evenly along the split.

    `cache`: where the split of a dataset that is not on this machine is copied to. `shape`: (height, width, channels)
    that encoded images are brought to, their middle is shown; those that cannot be used are left out. Datasets of one
    size need none.
    """
    if read_manifest(manifest_uri).format == "tar":
        if shape is None:
            raise DataError(
                "the dataset holds encoded images; their size has to be said",
                where=manifest_uri,
                hint="name a dataset of format raw, or a trainer of images",
            )
        return _decoded(manifest_uri, count=count, start=start, cache=cache, shape=shape)
    local = local_manifest(manifest_uri, cache=cache, splits=("test",))
    own = open_manifest(local).shape
    samples = _read(manifest_uri, local=local, count=count, start=start)
    pixels = _contents(samples).reshape(count, own.height, own.width, own.channels).transpose(0, 3, 1, 2)
    return HeldOut(
        images=to_unit(pixels),
        labels=np.array([sample.label for sample in samples], dtype=np.int64),
        captions=[sample.caption for sample in samples],
    )


def held_out_text(manifest_uri: str, *, count: int, cache: Path | None = None) -> NDArray[np.uint8]:
    """The bytes of `count` samples of text, [count, T]; `cache` as for `held_out`."""
    local = local_manifest(manifest_uri, cache=cache, splits=("test",))
    return _contents(_read(manifest_uri, local=local, count=count, start=0))


def _read(manifest_uri: str, *, local: str, count: int, start: int) -> list[Sample]:
    have = open_manifest(local).count("test")
    if start + count > have:
        raise _too_few(manifest_uri, start=start, count=count, have=have)
    return list(islice(read_samples(local, split="test"), start, start + count))


def _contents(samples: list[Sample]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(sample.pixels for sample in samples), dtype=np.uint8).reshape(len(samples), -1)


def _decoded(manifest_uri: str, *, count: int, start: int, cache: Path | None, shape: tuple[int, int, int]) -> HeldOut:
    _, files = open_source(manifest_uri, split="test", cache=cache)
    pixels = np.empty((count, *shape), dtype=np.uint8)
    with closing(open_contents(files)) as contents:
        known = fill_usable(contents, pixels, samples=range(start, files.samples))
    if len(known) < count:
        raise _too_few(manifest_uri, start=start, count=count, have=start + len(known))
    return HeldOut(
        images=to_unit(pixels.transpose(0, 3, 1, 2)),
        labels=np.array([one.label for one in known], dtype=np.int64),
        captions=[one.caption for one in known],
    )


def _too_few(manifest_uri: str, *, start: int, count: int, have: int) -> DataError:
    return DataError(
        f"held-out samples {start}..{start + count} are asked for, the dataset has {have} that can be used",
        where=manifest_uri,
        hint=f"ask for at most {max(0, have - start)} samples",
    )
