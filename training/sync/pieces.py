"""Contributions as the merge reads them: piece by piece, out of the bytes that came over the wire.

So a merge needs no float32 copy of an encoded contribution, and none that puts the ranks' parts together: memory is
what was received, and a few pieces that stay in a core's cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from training.sync.codec import Bytes, Codec, decode
from training.sync.layout import Floats, Ranges, count, find_gap

Array = npt.NDArray[Any]


class Pieces(Protocol):
    """A vector that can be read in pieces, from several threads at once."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int, room: Array) -> Array:
        """Elements `start` to `stop`, written to `room` (of just that length) or a view that must not be changed."""
        ...


Source = Array | Pieces


def read_piece(source: Source, start: int, stop: int, room: Array) -> Array:
    """A piece of an array or of anything that is read in pieces."""
    return source[start:stop] if isinstance(source, np.ndarray) else source.read(start, stop, room)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank sent: all elements of its ranges, one after the other, encoded as one array."""

    data: memoryview | Bytes
    ranges: Ranges
    codec: Codec


class Parts:
    """A fragment put together from the ranks' parts where it is read. Raises `ValueError` if they leave a gap."""

    def __init__(self, parts: Sequence[Part], *, start: int, length: int) -> None:
        """`start`, `length`: the fragment's place in the flat vector, in which the parts' ranges are given."""
        gap = find_gap([one for part in parts for one in part.ranges], total=length, first=start)
        if gap:
            raise ValueError(f"the parts do not cover the fragment exactly once: {gap}")
        self._length = length
        self._parts = [(part, count(part.ranges), _view(part)) for part in parts]
        self._segments = sorted(_segments(parts, start=start))
        self._starts = [one[0] for one in self._segments]

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int, room: Array) -> Array:
        index = bisect_right(self._starts, start) - 1
        here = start
        while here < stop:
            first, length, number, position = self._segments[index]
            until = min(stop, first + length)
            part, total, view = self._parts[number]
            place = position + here - first
            if view is not None and until - here == stop - start:
                return view[place : place + stop - start]
            decode(part.data, room[here - start : until - start], part.codec, first=place, count=total)
            here, index = until, index + 1
        return room


@dataclass(frozen=True, kw_only=True)
class Raised:
    """A displacement on top of what it was taken from: weights again."""

    base: Floats
    displacement: Source

    def __len__(self) -> int:
        return len(self.base)

    def read(self, start: int, stop: int, room: Array) -> Array:
        return np.add(self.base[start:stop], read_piece(self.displacement, start, stop, room), out=room)


def _view(part: Part) -> Floats | None:
    """A part that need not be decoded, as it lies there."""
    if part.codec != "fp32":
        return None
    view: Floats = np.frombuffer(part.data, "<f4")
    return view if view.flags.aligned else None


def _segments(parts: Sequence[Part], *, start: int) -> list[tuple[int, int, int, int]]:
    """(place in the fragment, length, part, place in the part) of each range that is not empty."""
    found: list[tuple[int, int, int, int]] = []
    for number, part in enumerate(parts):
        position = 0
        for first, length in part.ranges:
            if length:
                found.append((first - start, length, number, position))
            position += length
    return found
