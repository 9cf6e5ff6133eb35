"""Sources mix evenly: every prefix is within one sample of the exact shares, also where weights change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.mixture import Mixture, Segment

weights = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


def sources(mixture: Mixture, stop: int) -> np.ndarray:
    return mixture.at(np.arange(stop))[0]


@given(weights=weights)
@settings(deadline=None, max_examples=200)
def test_every_prefix_is_within_one_of_the_exact_share(weights: list[int]) -> None:
    found = sources(Mixture([Segment(0, tuple(weights))]), 2 * sum(weights) + 3)
    for source, weight in enumerate(weights):
        exact = np.arange(1, len(found) + 1) * weight / sum(weights)
        assert np.abs(np.cumsum(found == source) - exact).max() < 1


@given(weights=weights, change=st.lists(st.integers(0, 9), min_size=9, max_size=9).filter(lambda c: c[0] > 0),
       at=st.integers(1, 300), data=st.data())  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_source_gives_each_of_its_samples_once_and_in_order(
    weights: list[int], change: list[int], at: int, data: st.DataObject
) -> None:
    """Also where the weights change, and whatever part of the order is asked for."""
    mixture = Mixture([Segment(0, tuple(weights)), Segment(at, tuple(change[: len(weights)]))])
    found, indices = mixture.at(np.arange(at + 200))
    for source in range(len(weights)):
        own = indices[found == source]
        assert own.tolist() == list(range(len(own)))
    assert mixture.counts(at + 200).tolist() == np.bincount(found, minlength=len(weights)).tolist()
    start = data.draw(st.integers(0, at + 199))
    part = mixture.at(np.arange(start, at + 200))
    assert part[0].tolist() == found[start:].tolist()
    assert part[1].tolist() == indices[start:].tolist()


def test_a_far_position_costs_no_more_than_the_first() -> None:
    mixture = Mixture([Segment(0, (5, 3, 2))])
    far = 10**15
    found, indices = mixture.at(np.arange(far, far + 10))
    assert np.bincount(found).tolist() == [5, 3, 2]
    assert np.abs(indices - far * np.array([0.5, 0.3, 0.2])[found]).max() <= 10


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        ([], "begins at position 0"),
        ([Segment(3, (1,))], "begins at position 0"),
        ([Segment(0, (1, 2)), Segment(0, (1, 2))], "come after"),
        ([Segment(0, (1, 2)), Segment(5, (1,))], "1 weights from position 5, 2 sources"),
        ([Segment(0, (0, 0))], "one above"),
        ([Segment(0, (1, -1))], "at least 0"),
        ([Segment(0, (10**6 + 3, 10**6))], "round them"),
    ],
)
def test_weights_that_cannot_be_are_refused(segments: list[Segment], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Mixture(segments)
