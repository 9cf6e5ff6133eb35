"""Sums are exact: equal bits in any order and grouping, and the covariance is the one of exact fractions."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.evaluate import frechet
from services.evaluate.sums import GRID_BITS, LIMIT, MOST_SAMPLES, Sums, on_grid


def features(seed: int, *, samples: int, width: int, offset: float = 0.0) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return (offset + random.normal(size=(samples, width)) @ random.normal(size=(width, width))).astype(np.float32)


def same(first: Sums, second: Sums) -> bool:
    return first.count == second.count and all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ("first", "high", "cross", "low")
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 50), max_size=6))
def test_any_grouping_in_any_order_gives_the_same_bits(seed: int, cuts: list[int]) -> None:
    values = on_grid(features(seed, samples=50, width=5, offset=100.0))
    order = np.random.default_rng(seed).permutation(50)
    edges = [0, *sorted(cuts), 50]
    parts = [Sums.of(values[order][start:end]) for start, end in itertools.pairwise(edges)]
    total = Sums.none(5)
    for part in reversed(parts):
        total = part + total
    assert same(total, Sums.of(values))


def test_mean_and_covariance_are_those_of_exact_fractions() -> None:
    values = on_grid(features(3, samples=9, width=3, offset=-300.0))
    exact = [[Fraction(int(one), 2**GRID_BITS) for one in row] for row in values]
    mean = [sum(column) / 9 for column in zip(*exact, strict=True)]
    expected = [
        [float(sum((row[i] - mean[i]) * (row[j] - mean[j]) for row in exact) / 8) for j in range(3)] for i in range(3)
    ]
    sums = Sums.of(values)
    assert sums.mean().tolist() == [float(one) for one in mean]
    assert sums.covariance().tolist() == expected


def test_extremes_of_the_range_neither_overflow_nor_round() -> None:
    """Also the block's own bound: 2^20 rows of the largest products stay below 2^53."""
    edge = LIMIT - 1 - 2.0**-14
    values = on_grid(np.array([[edge, -edge], [-edge, edge], [edge, edge]]))
    assert Sums.of(values).covariance()[0, 0] == pytest.approx(4 / 3 * edge**2, rel=1e-15)
    assert 2.0**15 * 2.0**15 * 2**20 < 2.0**53


def test_the_distance_of_sums_is_the_one_of_the_samples_also_with_few_of_them() -> None:
    for samples in (8, 400):  # fewer and more than features
        first, second = (features(seed, samples=samples, width=24, offset=seed) for seed in (1, 2))
        here = frechet.distance(*(frechet.of_sums(Sums.of(on_grid(one))) for one in (first, second)))
        assert here == pytest.approx(frechet.frechet_distance(first, second), abs=1e-3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.array([[np.nan]]), "NaN"),
        (np.array([[np.inf]]), "NaN, or values outside"),
        (np.array([[LIMIT]]), "outside"),
        (np.zeros(3), "got shape"),
    ],
)
def test_what_is_not_on_the_grid_is_refused(values: NDArray[np.float64], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        on_grid(values)


def test_one_sample_two_widths_and_too_many_samples_are_refused() -> None:
    one = Sums.of(on_grid(np.zeros((1, 2))))
    with pytest.raises(ValueError, match="at least 2 samples"):
        one.covariance()
    with pytest.raises(ValueError, match="widths differ: 2 and 3"):
        _ = one + Sums.none(3)
    many = Sums(MOST_SAMPLES, one.first, one.high, one.cross, one.low)
    with pytest.raises(ValueError, match="samples; sums are exact"):
        _ = many + one
