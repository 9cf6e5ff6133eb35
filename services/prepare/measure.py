"""How a pen stroke looks, in numbers: weight, slant and size of the ink in one grey image.

Input is [height, width] with 0 for paper and 1 for full ink; grey values count as partly covered pixels, so all three
measures are continuous and do not jump when a line crosses a pixel's border. Tested on strokes that are rendered for
the purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Stroke:
    """What was measured."""

    weight: float
    """Mean width of the line in pixels: the ink's area over the line's length, which is half its outline."""
    slant: float
    """Shear of the ink: columns to the right per row upwards, from second moments; above 0 it leans right."""
    size: float
    """Area in pixels of the box around the ink; a row or column counts by its darkest pixel."""


def measure(ink: NDArray[np.float64]) -> Stroke:
    """Weight, slant and size; all zero for an empty image."""
    area = float(ink.sum())
    if area == 0.0:
        return Stroke(0.0, 0.0, 0.0)
    return Stroke(
        weight=2 * area / _outline(ink),
        slant=_shear(ink, area=area),
        size=float(ink.max(axis=0).sum() * ink.max(axis=1).sum()),
    )


def _outline(ink: NDArray[np.float64]) -> float:
    """Total variation over the darkest value: blurring a line's edge, or drawing it between two pixels, keeps it."""
    padded = np.pad(ink, 1)
    down = np.diff(padded, axis=0)[:, :-1]
    right = np.diff(padded, axis=1)[:-1, :]
    return float(np.hypot(down, right).sum() / ink.max())


def _shear(ink: NDArray[np.float64], *, area: float) -> float:
    rows, columns = np.indices(ink.shape)
    up = -(rows - (rows * ink).sum() / area)
    right = columns - (columns * ink).sum() / area
    vertical = float((up * up * ink).sum())
    return float((up * right * ink).sum()) / vertical if vertical else 0.0
