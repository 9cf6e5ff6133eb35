"""Sizes that images of several shapes are brought to while training, and how many of each size make a batch.

A bucket is one (width, height). All batches cost about the same: a bucket of fewer pixels has more samples in a batch.
Pure, standard library only: `resolve` decides the buckets of a run, loaders assign images to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_BUCKETS = 256
"""A plan holds the bucket of each sample in one byte."""


@dataclass(frozen=True)
class Bucket:
    """One size, and how many samples of it make a batch of the learner."""

    width: int
    height: int
    batch: int

    @property
    def aspect(self) -> float:
        """Width over height."""
        return self.width / self.height


def make_sizes(area: int, *, step: int, most_aspect: float) -> list[tuple[int, int]]:
    """All (width, height) in multiples of `step` with at most `area` pixels, each as large as fits, narrowest first.

    `most_aspect`: longest allowed ratio of the sides. Raises ValueError if nothing fits.
    """
    if step < 1 or area < step * step or most_aspect < 1:
        raise ValueError(f"no size in multiples of {step} has at most {area} pixels and an aspect up to {most_aspect}")

    def fits(width: int, height: int) -> bool:
        return width * height <= area and max(width / height, height / width) <= most_aspect

    found: list[tuple[int, int]] = []
    for width in range(step, int(area / step) + 1, step):
        height = int(min(area // width, width * most_aspect)) // step * step
        larger = (width + step, height), (width + step, height + step)
        if height and fits(width, height) and not any(fits(*one) for one in larger):
            found.append((width, height))
    if not found:
        raise ValueError(f"no size in multiples of {step} has at most {area} pixels and an aspect up to {most_aspect}")
    return found


def equal_cost(sizes: Sequence[tuple[int, int]], *, pixels: int, multiple: int = 1) -> list[Bucket]:
    """Buckets whose batches have about `pixels` pixels each, in multiples of `multiple` samples and at least that."""
    return [
        Bucket(width, height, max(multiple, int(pixels / (width * height)) // multiple * multiple))
        for width, height in sizes
    ]
