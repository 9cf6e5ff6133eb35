"""The Frechet distance agrees with closed forms and stays true where covariances are singular."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.evaluate.frechet import Gaussian, distance, fit, frechet_distance


def drawn(seed: int, *, samples: int, width: int) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    return random.normal(size=(samples, width)) @ random.normal(size=(width, width)) + random.normal(size=width)


def by_eigenvalues(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """The textbook way: eigenvalues of the product of covariances."""
    left, right = np.cov(first, rowvar=False), np.cov(second, rowvar=False)
    roots = np.sqrt(np.clip(np.linalg.eigvals(left @ right).real, 0, None)).sum()
    apart = ((first.mean(axis=0) - second.mean(axis=0)) ** 2).sum()
    return float(apart + np.trace(left) + np.trace(right) - 2 * roots)


def test_diagonal_gaussians_give_the_closed_form() -> None:
    first = Gaussian(mean=np.array([0.0, 1.0]), factor=np.diag([1.0, 2.0]))
    second = Gaussian(mean=np.array([3.0, 1.0]), factor=np.diag([4.0, 0.5]))
    assert distance(first, second) == pytest.approx(9 + (1 - 4) ** 2 + (2 - 0.5) ** 2, rel=1e-14)


def test_one_feature_gives_the_difference_of_deviations() -> None:
    first, second = drawn(1, samples=50, width=1), drawn(2, samples=70, width=1)
    expected = (first.mean() - second.mean()) ** 2 + (first.std(ddof=1) - second.std(ddof=1)) ** 2
    assert frechet_distance(first, second) == pytest.approx(float(expected), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(2, 12))
def test_full_rank_agrees_with_the_textbook_way(seed: int, width: int) -> None:
    first, second = drawn(seed, samples=60, width=width), drawn(seed + 1, samples=45, width=width)
    assert frechet_distance(first, second) == pytest.approx(by_eigenvalues(first, second), rel=1e-6, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), samples=st.integers(2, 40))
def test_a_set_has_no_distance_to_itself_even_with_fewer_samples_than_features(seed: int, samples: int) -> None:
    features = drawn(seed, samples=samples, width=24)
    scale = float((features**2).sum()) / samples
    assert frechet_distance(features, features) <= 1e-12 * scale


def test_a_constant_feature_and_a_repeated_feature_do_no_harm() -> None:
    first, second = drawn(3, samples=40, width=4), drawn(4, samples=40, width=4)
    plain = frechet_distance(first, second)
    padded = [np.hstack([one, np.full((40, 1), 7.0)]) for one in (first, second)]
    assert frechet_distance(*padded) == pytest.approx(plain, rel=1e-10)
    doubled = [np.hstack([one, one]) for one in (first, second)]
    assert frechet_distance(*doubled) == pytest.approx(2 * plain, rel=1e-10)


def test_low_rank_against_full_rank_matches_a_tiny_ridge() -> None:
    few, many = drawn(5, samples=6, width=10), drawn(6, samples=200, width=10)
    ridged = Gaussian(mean=few.mean(axis=0), factor=np.vstack([fit(few).factor, 1e-7 * np.eye(10)]))
    assert frechet_distance(few, many) == pytest.approx(distance(ridged, fit(many)), rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_it_is_symmetric_and_the_order_of_samples_does_not_matter(seed: int) -> None:
    first, second = drawn(seed, samples=30, width=16), drawn(seed + 1, samples=25, width=16)
    forward = frechet_distance(first, second)
    order = np.random.default_rng(seed).permutation(30)
    assert frechet_distance(second, first) == pytest.approx(forward, rel=1e-9)
    assert frechet_distance(first[order], second) == pytest.approx(forward, rel=1e-9)


def test_tiny_and_huge_features_keep_their_precision() -> None:
    first, second = drawn(7, samples=30, width=8), drawn(8, samples=30, width=8)
    plain = frechet_distance(first, second)
    for scale in (1e-8, 1e8):
        assert frechet_distance(first * scale, second * scale) == pytest.approx(plain * scale**2, rel=1e-9)


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (np.zeros((1, 4)), "at least 2 samples"),
        (np.zeros(4), "at least 2 samples"),
        (np.array([[0.0], [np.nan]]), "NaN"),
    ],
)
def test_what_cannot_be_fitted_is_refused(features: NDArray[np.float64], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(features)


def test_two_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="widths differ: 3 and 4"):
        frechet_distance(drawn(1, samples=9, width=3), drawn(1, samples=9, width=4))
