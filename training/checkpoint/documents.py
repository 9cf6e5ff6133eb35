"""The JSON files of a checkpoint, and the rule that its parts cover every tensor exactly once. No I/O here."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Literal

from spec.base import Record

Range = tuple[str, int, int]
"""Tensor, offset and length in elements of the whole row-major tensor."""


class Part(Record):
    """What one rank wrote."""

    rank: int
    file: str
    bytes: int
    sha256: str
    vectors: list[str]
    """Names of the flat vectors in the file, all of the same length and over the same ranges."""
    ranges: list[Range]
    """What the elements of each vector are, in order."""


class Receipt(Record):
    """A rank's answer to the coordinator."""

    rank: int
    part: Part | None = None
    error: str = ""
    """Why there is no part."""


class Manifest(Record):
    """Everything a reader needs to know before it opens a part."""

    version: Literal[1] = 1
    step: int
    epoch: int
    attempt: int
    world_size: int
    shapes: dict[str, list[int]]
    """Of the logical tensors, by name."""
    vectors: list[str]
    """What is saved for each tensor: `model`, `exp_avg`, `exp_avg_sq`, `ema` and the caller's own."""
    optimizer_steps: int
    state: dict[str, Any]
    """The caller's small values."""
    parts: list[Part]


class Commit(Record):
    """The last file; its presence makes the checkpoint."""

    version: Literal[1] = 1
    step: int
    epoch: int
    attempt: int
    manifest_sha256: str


def coverage_gap(shapes: dict[str, list[int]], *, parts: list[Part]) -> str:
    """Empty if the parts' ranges cover every element of every tensor exactly once; else the first place where they do
    not.
    """
    ranges: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for part in parts:
        for name, start, length in part.ranges:
            if length:
                ranges[name].append((start, length, part.rank))
    unknown = sorted(ranges.keys() - shapes.keys())
    if unknown:
        return f"rank {ranges[unknown[0]][0][2]} wrote {unknown[0]!r}, which is no tensor of the model"
    for name, shape in shapes.items():
        reached = 0
        for start, length, rank in sorted(ranges[name]):
            if start != reached:
                what = "nobody wrote" if start > reached else f"rank {rank} wrote again"
                return f"{what} {name!r} from element {min(start, reached)}"
            reached = start + length
        if reached != math.prod(shape):
            return f"{name!r} ends at element {reached} of {math.prod(shape)}"
    return ""
