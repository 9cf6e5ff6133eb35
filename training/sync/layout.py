"""The flat vector that both sides of the sync speak about.

All parameters of a model, sorted by name, as float32, one after the other; then its float buffers, which are in no
optimizer. A rank's shard is a list of element ranges `(start, length)` in that vector, so learners of different world
sizes can contribute to the same merge. Nothing here knows what a parameter means.

The vector is cut into fragments of equal size that are synchronised in turn; a cut may go through a tensor.
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
    buffers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    fragments: int = 1

    @classmethod
    def from_shapes(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        buffers: Mapping[str, Sequence[int]] | None = None,
        fragments: int = 1,
    ) -> Layout:
        """The layout of a model from the shapes of its parameters and buffers, whatever their order."""
        if not shapes:
            raise ValueError("a layout needs at least one parameter")
        twice = sorted(set(shapes) & set(buffers or {}))
        if twice:
            raise ValueError(f"{twice[0]!r} is both a parameter and a buffer")
        layout = cls(_canonical(shapes), _canonical(buffers or {}), fragments)
        if not 1 <= fragments <= max(1, layout.total):
            raise ValueError(f"{layout.total} elements cannot be cut into {fragments} fragments")
        return layout

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters, then buffers, as they lie in the vector."""
        return self.parameters + self.buffers

    @cached_property
    def total(self) -> int:
        """Elements of the whole vector."""
        return sum(math.prod(shape) for _, shape in self.tensors)

    @cached_property
    def trainable(self) -> int:
        """Elements that belong to parameters; those behind them are buffers."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over one line per tensor and the cut; equal fingerprints mean that ranges mean the same elements."""
        lines = [f"{name}\t{','.join(map(str, shape))}\tfloat32\n" for name, shape in self.parameters]
        lines += [f"{name}\t{','.join(map(str, shape))}\tfloat32\tbuffer\n" for name, shape in self.buffers]
        lines += [f"{self.fragments} fragments\n"] if self.fragments > 1 else []
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @cached_property
    def _offsets(self) -> dict[str, int]:
        offsets: dict[str, int] = {}
        start = 0
        for name, shape in self.tensors:
            offsets[name] = start
            start += math.prod(shape)
        return offsets

    def offset(self, name: str) -> int:
        """First element of a parameter or buffer."""
        return self._offsets[name]

    def fragment_range(self, fragment: int) -> tuple[int, int]:
        """(start, length) of a fragment: all are equally long, up to one element."""
        if not 0 <= fragment < self.fragments:
            raise ValueError(f"there is no fragment {fragment} of {self.fragments}")
        start = fragment * self.total // self.fragments
        return start, (fragment + 1) * self.total // self.fragments - start

    def trainable_in(self, fragment: int) -> int:
        """Leading elements of a fragment that belong to parameters."""
        start, length = self.fragment_range(fragment)
        return min(max(self.trainable - start, 0), length)

    def shapes(self) -> dict[str, list[int]]:
        """What `from_shapes` reads back."""
        return {name: list(shape) for name, shape in self.parameters}

    def buffer_shapes(self) -> dict[str, list[int]]:
        """What `from_shapes` reads back as `buffers`."""
        return {name: list(shape) for name, shape in self.buffers}

    @property
    def whole(self) -> list[tuple[int, int]]:
        """The ranges of somebody who holds everything."""
        return [(0, self.total)]


def _canonical(shapes: Mapping[str, Sequence[int]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    for name, shape in shapes.items():
        if any(side < 0 for side in shape):
            raise ValueError(f"parameter {name!r} has the impossible shape {list(shape)}")
    return tuple(sorted((name, tuple(int(side) for side in shape)) for name, shape in shapes.items()))


def count(ranges: Ranges) -> int:
    """Elements in the ranges."""
    return sum(length for _, length in ranges)


def intersect(ranges: Ranges, interval: tuple[int, int]) -> list[tuple[int, int]]:
    """The parts of the ranges that lie inside (start, length), in the same order."""
    first, end = interval[0], interval[0] + interval[1]
    cut = [(max(start, first), min(start + length, end)) for start, length in ranges]
    return [(start, stop - start) for start, stop in cut if start < stop]


def shift(ranges: Ranges, by: int) -> list[tuple[int, int]]:
    """The same ranges counted from another element."""
    return [(start + by, length) for start, length in ranges]


def find_range_problem(ranges: Ranges, *, total: int, first: int = 0) -> str:
    """Why these ranges cannot be part of `total` elements that begin with element `first`, or an empty text."""
    end = first
    for start, length in sorted(ranges):
        if start < first or length < 0 or start + length > first + total:
            return f"range ({start}, {length}) lies outside the {total} elements from {first} on"
        if start < end and length:
            return f"element {start} is covered twice"
        end = max(end, start + length)
    return ""


def find_gap(ranges: Ranges, *, total: int, first: int = 0) -> str:
    """Why these ranges do not cover every one of these elements exactly once, or an empty text."""
    problem = find_range_problem(ranges, total=total, first=first)
    if problem:
        return problem
    end = first
    for start, length in sorted(one for one in ranges if one[1]):
        if start > end:
            return f"elements {end} to {start - 1} are missing"
        end = start + length
    return "" if end == first + total else f"elements {end} to {first + total - 1} are missing"


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


def combine_fingerprints(fragments: Sequence[str]) -> str:
    """The digest of the whole vector from those of its fragments in order; that of a single fragment is its own."""
    if len(fragments) < 2:
        return "".join(fragments)
    return hashlib.sha256("\n".join(fragments).encode()).hexdigest()


def view_bytes(array: npt.NDArray[np.float32]) -> memoryview:
    """The bytes of a contiguous array without a copy."""
    return array.data.cast("B") if array.size else memoryview(bytearray())
