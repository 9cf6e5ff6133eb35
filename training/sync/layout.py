"""The flat vector that both sides of the sync speak about.

All parameters of a model, sorted by name, as float32, one after the other. A rank's shard is a list of element ranges
`(start, length)` in that vector, so learners of different world sizes can contribute to the same merge. Nothing here
knows what a parameter means.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """Names and shapes in canonical order."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """The layout of a model from its parameters' shapes, whatever their order."""
        if not shapes:
            raise ValueError("a layout needs at least one parameter")
        for name, shape in shapes.items():
            if any(side < 0 for side in shape):
                raise ValueError(f"parameter {name!r} has the impossible shape {list(shape)}")
        return cls(tuple(sorted((name, tuple(int(side) for side in shape)) for name, shape in shapes.items())))

    @cached_property
    def total(self) -> int:
        """Elements of the whole vector."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over one line per parameter; equal fingerprints mean that ranges mean the same elements."""
        lines = "".join(f"{name}\t{','.join(map(str, shape))}\tfloat32\n" for name, shape in self.parameters)
        return hashlib.sha256(lines.encode()).hexdigest()

    @cached_property
    def _offsets(self) -> dict[str, int]:
        offsets: dict[str, int] = {}
        start = 0
        for name, shape in self.parameters:
            offsets[name] = start
            start += math.prod(shape)
        return offsets

    def offset(self, name: str) -> int:
        """First element of a parameter."""
        return self._offsets[name]

    def shapes(self) -> dict[str, list[int]]:
        """What `from_shapes` reads back."""
        return {name: list(shape) for name, shape in self.parameters}

    @property
    def whole(self) -> list[tuple[int, int]]:
        """The ranges of somebody who holds everything."""
        return [(0, self.total)]


def count(ranges: Ranges) -> int:
    """Elements in the ranges."""
    return sum(length for _, length in ranges)


def find_range_problem(ranges: Ranges, *, total: int) -> str:
    """Why these ranges cannot be part of a vector of `total` elements, or an empty text."""
    end = 0
    for start, length in sorted(ranges):
        if start < 0 or length < 0 or start + length > total:
            return f"range ({start}, {length}) lies outside the {total} elements of the layout"
        if start < end and length:
            return f"element {start} is covered twice"
        end = max(end, start + length)
    return ""


def find_gap(ranges: Ranges, *, total: int) -> str:
    """Why these ranges do not cover every element exactly once, or an empty text."""
    problem = find_range_problem(ranges, total=total)
    if problem:
        return problem
    end = 0
    for start, length in sorted(one for one in ranges if one[1]):
        if start > end:
            return f"elements {end} to {start - 1} are missing"
        end = start + length
    return "" if end == total else f"elements {end} to {total - 1} are missing"


def gather(flat: Floats, ranges: Ranges) -> Floats:
    """The ranges' elements, one after the other; a view when it is one range."""
    if len(ranges) == 1:
        start, length = ranges[0]
        return flat[start : start + length]
    if not ranges:
        return np.empty(0, np.float32)
    return np.concatenate([flat[start : start + length] for start, length in ranges])


def scatter(flat: Floats, ranges: Ranges, values: Floats) -> None:
    """Write elements that `gather` read back to their places."""
    position = 0
    for start, length in ranges:
        flat[start : start + length] = values[position : position + length]
        position += length


def fingerprint_weights(flat: Floats) -> str:
    """`theta_sha256`: the digest by which learners and syncer prove that they hold the same weights."""
    if flat.dtype != np.float32 or not flat.flags.c_contiguous:
        raise ValueError(f"weights must be contiguous float32, got {flat.dtype}")
    return hashlib.sha256(view_bytes(flat)).hexdigest()


def view_bytes(array: npt.NDArray[np.float32]) -> memoryview:
    """The bytes of a contiguous array without a copy."""
    return array.data.cast("B") if array.size else memoryview(bytearray())
