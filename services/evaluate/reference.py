"""The real images that generated ones are measured against.

Everything is put in an order that depends on samples alone (by label and id), so neither shards nor batches can move
a result. The held-out split is cut into two disjoint halves with the same mix of labels: half A is what generated
images are compared with, half B stands for a perfect generator.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.errors import DataError, RefusedError
from spec.shards import Manifest, Sample, Split, read_samples

MAX_BYTES = 2**30
"""Pixels of one split that are held in memory; a larger dataset needs an evaluation that streams."""


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


def load_split(uri: str, *, manifest: Manifest, split: Split) -> Images:
    """All images of a split, every shard verified against the manifest."""
    count, each = manifest.count(split), manifest.shape.pixels
    if count < 2:
        raise DataError(f"the {split} split has {count} samples, an evaluation needs at least 2", where=uri)
    if count * each > MAX_BYTES:
        raise RefusedError(
            f"the {split} split has {count * each:,} bytes of pixels, evaluation holds at most {MAX_BYTES:,}",
            hint="evaluate against a manifest with fewer samples",
            where=uri,
        )
    samples = sorted(read_samples(uri, split=split), key=_by_id)
    shape = (len(samples), manifest.image_height, manifest.image_width, manifest.image_channels)
    pixels = np.frombuffer(b"".join(one.pixels for one in samples), dtype=np.uint8).reshape(shape)
    labels = np.array([one.label for one in samples], dtype=np.int64)
    if labels.min() < 0 or labels.max() >= len(manifest.labels):
        raise DataError(f"a label is outside 0..{len(manifest.labels) - 1}", where=uri)
    return Images(pixels, labels)


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


def _by_id(sample: Sample) -> int:
    return sample.id
