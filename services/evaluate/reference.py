"""The real images that generated ones are measured against.

Everything is put in an order that depends on samples alone (by label and id), so neither shards nor batches can move
a result. The held-out split is cut into two disjoint halves with the same mix of labels: half A is what generated
images are compared with, half B stands for a perfect generator. Real and generated images have the same size and are
made coarse by the same rule, so a resampling filter cannot pass for a difference between them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec.errors import DataError, RefusedError
from spec.shards import Manifest, Split, path_of, read_samples
from storage.datasets import SPLITS, local_manifest, origin_of, read_manifest, shard_files
from storage.encoded import EncodedImages, Unusable
from storage.shard_files import ShardFiles

MAX_IMAGES = 10_000
"""Of one split; of a larger one so many are taken, evenly spread."""
KEPT_SIDE = 32
"""Larger images are averaged down until their shorter side is at most this: a yardstick needs no fine detail."""
_FEWEST = 2
_AT_ONCE = 64
"""Images that are asked for before the first of them is decoded."""
_LABELS = "prepare the dataset with labels (`gkr data prepare --labels folders`), or leave the evaluation service out"


@dataclass(frozen=True)
class Images:
    """Images of one split, ordered by id."""

    pixels: NDArray[np.uint8]
    """[images, height, width, channels]."""
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.int64]) -> Images:
        """Those at `index`, in that order."""
        return Images(self.pixels[index], self.labels[index])


def load_splits(uri: str, *, cache: Path, shape: tuple[int, ...] = (), most: int = MAX_IMAGES) -> tuple[Images, Images]:
    """Training and held-out images of a dataset of any store, made coarse; of each at most `most`, evenly spread.

    `cache`: the node's folder for copies. `shape`: (height, width, channels) that encoded images are brought to first,
    as a trainer does; those that cannot be used or have no label are left out.
    """
    manifest = read_manifest(uri)
    if not manifest.labels:
        raise RefusedError("the dataset has no labels, which an evaluation measures by", where=uri, hint=_LABELS)
    chosen = {split: _evenly(manifest.count(split), most) for split in SPLITS}
    if manifest.format == "raw":
        local = local_manifest(uri, cache=cache)
        found = {split: _raw(local, manifest=manifest, split=split, chosen=chosen[split]) for split in SPLITS}
    else:
        with closing(_open(uri, manifest=manifest, cache=cache)) as images:
            found = {
                split: _encoded(images, manifest=manifest, split=split, chosen=chosen[split], shape=shape)
                for split in SPLITS
            }
    for split, one in found.items():
        if len(one) < _FEWEST:
            raise DataError(
                f"{len(one)} samples of the {split} split can be used, an evaluation needs at least {_FEWEST}",
                where=uri,
                hint="prepare the dataset with more images, or with a larger --held-out",
            )
    return found["train"], found["test"]


def coarse(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images [..., height, width, channels], halved by the mean of 2 x 2 pixels until they are small enough."""
    while min(height := pixels.shape[-3], width := pixels.shape[-2]) > KEPT_SIDE:
        part = pixels[..., : height // 2 * 2, : width // 2 * 2, :].astype(np.uint16)
        rows = part[..., 0::2, :, :] + part[..., 1::2, :, :]
        pixels = ((rows[..., 0::2, :] + rows[..., 1::2, :] + 2) >> 2).astype(np.uint8)
    return pixels


def _raw(uri: str, *, manifest: Manifest, split: Split, chosen: Sequence[int]) -> Images:
    """Every shard is verified against the manifest."""
    shape, wanted = (manifest.image_height, manifest.image_width, manifest.image_channels), frozenset(chosen)
    found = [
        (one.id, one.label, coarse(np.frombuffer(one.pixels, dtype=np.uint8).reshape(shape)))
        for number, one in enumerate(read_samples(uri, split=split))
        if number in wanted
    ]
    found.sort(key=lambda one: one[0])
    labels = np.array([label for _, label, _ in found], dtype=np.int64)
    if len(labels) and (labels.min() < 0 or labels.max() >= len(manifest.labels)):
        raise DataError(f"a label is outside 0..{len(manifest.labels) - 1}", where=uri, hint=_LABELS)
    return Images(_stacked([pixels for *_, pixels in found], shape=shape), labels)


def _open(uri: str, *, manifest: Manifest, cache: Path) -> EncodedImages:
    """Both splits; shards of other machines are read by range."""
    local = local_manifest(uri, cache=cache, splits=())
    folder = path_of(local).parent
    assert manifest.index is not None
    shards = shard_files([*manifest.splits.train, *manifest.splits.test], folder=folder)
    files = ShardFiles(shards, origin=origin_of(uri, local=local))
    return EncodedImages(folder / manifest.index.path, samples=manifest.index.samples, files=files)


def _encoded(
    images: EncodedImages, *, manifest: Manifest, split: Split, chosen: Sequence[int], shape: tuple[int, ...]
) -> Images:
    first, whole = manifest.rows(split).start, np.empty(shape, dtype=np.uint8)
    found: list[tuple[int, NDArray[np.uint8]]] = []
    for start in range(0, len(chosen), _AT_ONCE):
        rows = [first + number for number in chosen[start : start + _AT_ONCE]]
        images.expect(rows)
        for row in rows:
            with suppress(Unusable):
                label = images.fill(whole, row).get("label")
                if isinstance(label, int) and 0 <= label < len(manifest.labels):
                    found.append((label, coarse(whole).copy()))
    labels = np.array([label for label, _ in found], dtype=np.int64)
    return Images(_stacked([pixels for _, pixels in found], shape=shape), labels)


def _stacked(images: list[NDArray[np.uint8]], *, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.stack(images) if images else np.empty((0, *shape), dtype=np.uint8)


def _evenly(count: int, most: int) -> Sequence[int]:
    return range(count) if count <= most else [place * count // most for place in range(most)]


def halves(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two disjoint index sets with equal numbers of every label, each in an order of which any prefix is balanced."""
    rank = _rank_in_label(labels)
    pairs = 2 * (np.bincount(labels) // 2)
    used = rank < pairs[labels]
    first = np.flatnonzero(used & (rank % 2 == 0))
    second = np.flatnonzero(used & (rank % 2 == 1))
    return first[np.lexsort((labels[first], rank[first]))], second[np.lexsort((labels[second], rank[second]))]


def balanced_choice(pixels: NDArray[np.uint8], *, labels: Sequence[int], count: int) -> NDArray[np.int64]:
    """Indices of `count` images with a balanced mix of labels, chosen by content: their order does not matter."""
    digests = [hashlib.sha256(image.tobytes()).digest() for image in pixels]
    by_content = sorted(range(len(pixels)), key=lambda i: (labels[i], digests[i]))
    seen: Counter[int] = Counter()
    keys: list[tuple[int, int, int]] = []
    for index in by_content:
        keys.append((seen[labels[index]], labels[index], index))
        seen[labels[index]] += 1
    return np.array([index for *_, index in sorted(keys)[:count]], dtype=np.int64)


def _rank_in_label(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each sample how many of its label came before it."""
    rank = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        where = np.flatnonzero(labels == label)
        rank[where] = np.arange(len(where))
    return rank
