"""Held-out samples, for validation and evaluation: never trained on, always the same ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec.buckets import Bucket
from spec.errors import DataError
from spec.shards import Sample, open_manifest, read_samples
from storage.datasets import local_manifest, read_manifest
from storage.encoded import Unusable, fill_usable
from training.data.batch import to_unit
from training.data.contents import Known, open_contents
from training.data.work import codes_of, open_source


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
    """The samples of the test split from number `start` on, at most `count`; `prepare` mixes the labels evenly along
    the split. DataError if there are none.

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
    pixels = _contents(samples).reshape(-1, own.height, own.width, own.channels).transpose(0, 3, 1, 2)
    return HeldOut(
        images=to_unit(pixels),
        labels=np.array([sample.label for sample in samples], dtype=np.int64),
        captions=[sample.caption for sample in samples],
    )


class Group(NamedTuple):
    """Held-out samples of one size."""

    places: NDArray[np.int64]
    """[n]: where each stands among all that were asked for."""
    samples: HeldOut


def held_out_by_size(
    manifest_uri: str, *, count: int, buckets: Sequence[Bucket], joined: NDArray[np.integer], channels: int,
    cache: Path | None = None,
) -> list[Group]:  # fmt: skip
    """The first samples of the test split that can be used, at most `count`, each in the size of its bucket, its middle
    shown.

    `joined`: which bucket each bucket's samples go to (`training.data.buckets.join_rare`).
    """
    _, files = open_source(manifest_uri, split="test", cache=cache)
    codes, found = joined[codes_of(files, buckets)].tolist(), 0
    groups: dict[int, list[tuple[int, NDArray[np.uint8], Known]]] = defaultdict(list)
    with closing(open_contents(files)) as contents:
        for number in range(files.samples):
            if found == count:
                break
            bucket = buckets[codes[number]]
            pixels = np.empty((bucket.height, bucket.width, channels), dtype=np.uint8)
            with suppress(Unusable):
                groups[codes[number]].append((found, pixels, contents.fill(pixels, number)))
                found += 1
    if not found:
        raise _none_left(manifest_uri, start=0)
    return [
        Group(np.array([place for place, _, _ in group]), _as_held_out(np.stack([one for _, one, _ in group]),
              [known for _, _, known in group]))
        for _, group in sorted(groups.items())
    ]  # fmt: skip


def held_out_text(manifest_uri: str, *, count: int, cache: Path | None = None) -> NDArray[np.uint8]:
    """The bytes of the first samples of text, at most `count`, [n, T]; `cache` as for `held_out`."""
    local = local_manifest(manifest_uri, cache=cache, splits=("test",))
    return _contents(_read(manifest_uri, local=local, count=count, start=0))


def _read(manifest_uri: str, *, local: str, count: int, start: int) -> list[Sample]:
    found = list(islice(read_samples(local, split="test"), start, start + count))
    if not found:
        raise _none_left(manifest_uri, start=start)
    return found


def _contents(samples: list[Sample]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(sample.pixels for sample in samples), dtype=np.uint8).reshape(len(samples), -1)


def _decoded(manifest_uri: str, *, count: int, start: int, cache: Path | None, shape: tuple[int, int, int]) -> HeldOut:
    _, files = open_source(manifest_uri, split="test", cache=cache)
    pixels = np.empty((count, *shape), dtype=np.uint8)
    with closing(open_contents(files)) as contents:
        known = fill_usable(pixels, samples=range(start, files.samples), fill=contents.fill)
    if not known:
        raise _none_left(manifest_uri, start=start)
    return _as_held_out(pixels[: len(known)], known)


def _as_held_out(pixels: NDArray[np.uint8], known: Sequence[Known]) -> HeldOut:
    """Of pixels [n, H, W, C]."""
    return HeldOut(
        images=to_unit(pixels.transpose(0, 3, 1, 2)),
        labels=np.array([one.label for one in known], dtype=np.int64),
        captions=[one.caption for one in known],
    )


def _none_left(manifest_uri: str, *, start: int) -> DataError:
    return DataError(
        f"the dataset has no held-out sample from number {start} on that can be used",
        where=manifest_uri,
        hint="prepare the dataset with a larger --held-out; `gkr data inspect` shows the sizes of its images",
    )
