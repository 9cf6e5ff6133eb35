"""Distances to the nearest training image are exact, so a copy is seen as one."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from services.evaluate import neighbours
from services.evaluate.neighbours import median_nearest, nearest_distances


def noise(seed: int, *, count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 5, 4, 3), dtype=np.uint8)


def test_distances_are_those_of_the_definition() -> None:
    images, references = noise(1, count=7), noise(2, count=31)
    pairs = (images[:, None].astype(float) - references[None].astype(float)) / 255
    expected = np.sqrt((pairs**2).sum(axis=(2, 3, 4))).min(axis=1)
    assert nearest_distances(images, references=references) == pytest.approx(expected, rel=1e-12)


def test_a_copy_has_distance_zero_exactly() -> None:
    references = noise(3, count=20)
    assert (nearest_distances(references[4:9], references=references) == 0).all()


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    images, references = noise(4, count=6), noise(5, count=23)
    whole = nearest_distances(images, references=references)
    monkeypatch.setattr(neighbours, "_BLOCK_BYTES", 1)
    assert (nearest_distances(images, references=references) == whole).all()


def test_copies_among_half_of_the_images_pull_the_median_to_zero() -> None:
    references = noise(6, count=20)
    mixed = np.concatenate([references[:6], noise(7, count=5)])
    assert median_nearest(mixed, references=references) == 0
    assert median_nearest(noise(7, count=5), references=references) > 1


def test_other_shapes_and_no_references_are_refused() -> None:
    with pytest.raises(ValueError, match="images are"):
        nearest_distances(noise(1, count=2)[:, :3], references=noise(2, count=2))
    with pytest.raises(ValueError, match="no reference"):
        nearest_distances(noise(1, count=2), references=noise(2, count=0))
