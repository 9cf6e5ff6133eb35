"""Sums of features that add up exactly: in any order, in any grouping, over any number of shards. Pure numpy.

Floating-point sums depend on their order, so a Frechet distance of the same images used to depend on the batch size
(torchmetrics issue 1620). Here each feature is put on a grid of 2^-22 once, which moves it by at most 1.2e-7, and from
there on everything is integer arithmetic: counts, sums and sums of products. A value is cut in two halves of 16 bits,
so that products of halves, summed over a block of samples by a float64 matrix product, stay below 2^53, where float64
holds every integer. The covariance is the integers' own, rounded once: no cancellation, however far off the mean lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

GRID_BITS = 22
LIMIT = 512.0
"""Features lie between minus this and this: with 22 bits behind the point they fill 32 bits."""
MOST_SAMPLES = 2**30
"""Beyond it a sum could leave 64 bits."""
_HALF_BITS = 16
_BLOCK_ROWS = 2**20


def on_grid(features: NDArray[np.floating]) -> NDArray[np.int32]:
    """Features [samples, width] in units of 2^-22, each rounded to the nearest.

    Raises ValueError for NaN, infinity and what lies outside +-LIMIT.
    """
    values = np.asarray(features, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"expected features as [samples, width], got shape {values.shape}")
    if not (np.abs(values) < LIMIT - 1).all():  # also false for NaN
        raise ValueError(f"features contain NaN, or values outside +-{LIMIT - 1:g}")
    return np.rint(np.ldexp(values, GRID_BITS)).astype(np.int32)


@dataclass(frozen=True)
class Sums:
    """Count, sum and second moment of features on the grid. `a + b` is exact."""

    count: int
    first: Integers
    """[width], sum of the values."""
    high: Integers
    """[width, width], sums of products of the upper halves."""
    cross: Integers
    """Sums of products of an upper and a lower half, both ways."""
    low: Integers
    """Sums of products of the lower halves."""

    @classmethod
    def of(cls, values: NDArray[np.int32]) -> Sums:
        """Of values [samples, width] from `on_grid`."""
        total = cls.none(values.shape[1])
        for start in range(0, len(values), _BLOCK_ROWS):
            total = total + cls._of_block(values[start : start + _BLOCK_ROWS].astype(np.int64))
        return total

    @classmethod
    def none(cls, width: int) -> Sums:
        """Of no samples."""
        nothing = np.zeros((width, width), dtype=np.int64)
        return cls(0, np.zeros(width, dtype=np.int64), nothing, nothing, nothing)

    @classmethod
    def _of_block(cls, values: Integers) -> Sums:
        upper = (values + (1 << (_HALF_BITS - 1))) >> _HALF_BITS
        lower = (values - (upper << _HALF_BITS)).astype(np.float64)
        above = upper.astype(np.float64)
        mixed = (above.T @ lower).astype(np.int64)
        return cls(
            count=len(values),
            first=values.sum(axis=0),
            high=(above.T @ above).astype(np.int64),
            cross=mixed + mixed.T,
            low=(lower.T @ lower).astype(np.int64),
        )

    def __add__(self, other: Sums) -> Sums:
        if self.first.shape != other.first.shape:
            raise ValueError(f"feature widths differ: {len(self.first)} and {len(other.first)}")
        if self.count + other.count > MOST_SAMPLES:
            raise ValueError(f"{self.count + other.count:,} samples; sums are exact for at most {MOST_SAMPLES:,}")
        return Sums(
            self.count + other.count,
            self.first + other.first,
            self.high + other.high,
            self.cross + other.cross,
            self.low + other.low,
        )

    def mean(self) -> NDArray[np.float64]:
        """[width], correctly rounded."""
        return np.array([int(value) / (self.count << GRID_BITS) for value in self.first])

    def covariance(self) -> NDArray[np.float64]:
        """[width, width], unbiased (divided by count - 1), each entry correctly rounded; needs two samples.

        Row by row in Python's integers: two seconds for a width of 2048, and no matrix of objects.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 samples, there are {self.count}")
        divisor = (self.count * (self.count - 1)) << (2 * GRID_BITS)
        first = self.first.astype(object)
        rows: list[list[float]] = []
        for high, cross, low, own in zip(self.high, self.cross, self.low, first, strict=True):
            products = (high.astype(object) << (2 * _HALF_BITS)) + (cross.astype(object) << _HALF_BITS) + low
            rows.append([int(value) / divisor for value in self.count * products - own * first])
        return np.array(rows)
