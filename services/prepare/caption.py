"""Words for what a scan shows: the digit, and the weight, slant and size of its stroke.

What counts as thin, medium or bold (and likewise for slant and size) are the terciles of the training split, so that
each word is used about equally often and held-out scans are described by the same scale. The template is chosen by
the sample's number alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from services.prepare.measure import Stroke

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WEIGHTS = ("thin", "medium-weight", "bold")
SLANTS = ("leaning left", "upright", "leaning right")
SIZES = ("small", "medium-sized", "large")
TEMPLATES = (
    "a {weight} handwritten {digit}, {slant}, {size}",
    "a {size} handwritten {digit} with {weight} strokes, {slant}",
    "the digit {digit} in {weight} handwriting, {size} and {slant}",
    "handwritten {digit}: {weight} pen, {slant}, {size}",
    "{digit}, written by hand, {slant}, {weight} and {size}",
)


@dataclass(frozen=True)
class Scale:
    """Lower and upper tercile of each measure."""

    weight: tuple[float, float]
    slant: tuple[float, float]
    size: tuple[float, float]


def scale_of(strokes: Sequence[Stroke]) -> Scale:
    """The terciles of these strokes."""
    return Scale(
        weight=_terciles([one.weight for one in strokes]),
        slant=_terciles([one.slant for one in strokes]),
        size=_terciles([one.size for one in strokes]),
    )


def describe(stroke: Stroke, *, label: int, sample: int, scale: Scale) -> str:
    """One caption."""
    template = TEMPLATES[blake2b(f"template/1\0{sample}".encode(), digest_size=1).digest()[0] % len(TEMPLATES)]
    return template.format(
        digit=DIGITS[label],
        weight=WEIGHTS[_third(stroke.weight, scale.weight)],
        slant=SLANTS[_third(stroke.slant, scale.slant)],
        size=SIZES[_third(stroke.size, scale.size)],
    )


def _terciles(values: Sequence[float]) -> tuple[float, float]:
    lower, upper = np.quantile(np.array(values), (1 / 3, 2 / 3))
    return float(lower), float(upper)


def _third(value: float, bounds: tuple[float, float]) -> int:
    return int(value > bounds[0]) + int(value > bounds[1])
