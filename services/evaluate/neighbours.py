"""How far images lie from the training images: the check against copying. Pure numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 32 * 2**20


def nearest_distances(images: NDArray[np.uint8], *, references: NDArray[np.uint8]) -> NDArray[np.float64]:
    """L2 distance in pixels scaled to [0, 1] from each image to its nearest reference; [images].

    Exact: pixels are integers, so the expanded square below loses nothing and a copy has distance 0. Blocks bound the
    memory.
    """
    if images.shape[1:] != references.shape[1:]:
        raise ValueError(f"images are {images.shape[1:]}, references {references.shape[1:]}")
    if not len(references):
        raise ValueError("there are no reference images")
    queries = images.reshape(len(images), -1).astype(np.float64)
    best = np.full(len(queries), np.inf)
    query_squares = (queries**2).sum(axis=1)
    row_bytes = 8 * (queries.shape[1] + max(1, len(queries)))
    block = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(references), block):
        part = references[start : start + block].reshape(-1, queries.shape[1]).astype(np.float64)
        squares = query_squares[:, None] + (part**2).sum(axis=1)[None, :] - 2.0 * (queries @ part.T)
        best = np.minimum(best, squares.min(axis=1))
    return np.sqrt(best) / 255.0


def median_nearest(images: NDArray[np.uint8], *, references: NDArray[np.uint8]) -> float:
    """Median of `nearest_distances`."""
    return float(np.median(nearest_distances(images, references=references)))
