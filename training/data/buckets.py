"""Which size an image belongs to (the sizes themselves: `spec.buckets`).

An image goes to the bucket whose aspect ratio is nearest to its own, measured as the
distance of logarithms, so that twice as wide and twice as high are equally far; ties go to the earlier bucket. Buckets
that too few samples belong to are joined with their nearest neighbour before a run begins: a rare shape is cropped a
little more, never dropped. numpy only: loader workers import this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spec.buckets import Bucket

_CHUNK = 1 << 20


def assign(
    widths: NDArray[np.integer], heights: NDArray[np.integer], *, buckets: Sequence[Bucket]
) -> NDArray[np.int16]:
    """Number of the bucket of each image; widths and heights are those after EXIF rotation, at least 1."""
    order = sorted(range(len(buckets)), key=lambda number: (buckets[number].aspect, number))
    aspects = np.log([buckets[number].aspect for number in order])
    wanted = np.log(widths.astype(np.float64) / heights)
    middles = (aspects[1:] + aspects[:-1]) / 2
    return np.array(order, dtype=np.int16)[np.searchsorted(middles, wanted, side="left")]


def join_rare(counts: Sequence[int], *, buckets: Sequence[Bucket], least: int) -> NDArray[np.int16]:
    """Which bucket each bucket's samples go to so that all that remain have `least` samples, if there are so many.

    The rarest goes first, to the nearest by aspect that remains.
    """
    target = np.arange(len(buckets), dtype=np.int16)
    left = {number: int(count) for number, count in enumerate(counts)}
    while len(left) > 1:
        rarest = min(left, key=lambda number: (left[number], number))
        if left[rarest] >= least:
            break
        count = left.pop(rarest)
        own = np.log(buckets[rarest].aspect)
        nearest = min(left, key=lambda number: (abs(np.log(buckets[number].aspect) - own), number))
        left[nearest] += count
        target[target == rarest] = nearest
    return target


def bucket_codes(index: NDArray[np.void], *, buckets: Sequence[Bucket]) -> NDArray[np.uint8]:
    """Number of the bucket of each record of a dataset's index: one byte each, so that a plan can hold them all."""
    codes = np.empty(len(index), dtype=np.uint8)
    for first in range(0, len(index), _CHUNK):
        rows = index[first : first + _CHUNK]
        codes[first : first + _CHUNK] = assign(rows["width"], rows["height"], buckets=buckets)
    return codes
