"""The order of samples is a permutation per epoch and depends on nothing but its four arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.order import sample_ids

DIGEST = "ab" * 32


def ids(start: int, stop: int, *, n: int, seed: int = 0, learner: str = "east", digest: str = DIGEST) -> list[int]:
    return sample_ids(digest, n=n, seed=seed, learner=learner, positions=np.arange(start, stop)).tolist()


@given(n=st.integers(1, 700), epoch=st.integers(0, 10**6), seed=st.integers(0, 2**40), learner=st.text(max_size=8))
@settings(deadline=None, max_examples=50)
def test_each_epoch_is_a_permutation(n: int, epoch: int, seed: int, learner: str) -> None:
    assert sorted(ids(epoch * n, epoch * n + n, n=n, seed=seed, learner=learner)) == list(range(n))


@given(n=st.integers(50, 300), start=st.integers(0, 2000), length=st.integers(0, 700), data=st.data())
@settings(deadline=None, max_examples=30)
def test_any_cut_of_the_positions_gives_the_same_order(n: int, start: int, length: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(start, start + length))
    whole = ids(start, start + length, n=n)
    assert ids(start, cut, n=n) + ids(cut, start + length, n=n) == whole
    backwards = sample_ids(DIGEST, n=n, seed=0, learner="east", positions=np.arange(start, start + length)[::-1])
    assert backwards.tolist()[::-1] == whole


def test_learners_seeds_epochs_and_datasets_have_orders_of_their_own() -> None:
    orders = [
        ids(0, 1000, n=1000),
        ids(1000, 2000, n=1000),
        ids(0, 1000, n=1000, learner="central"),
        ids(0, 1000, n=1000, seed=1),
        ids(0, 1000, n=1000, digest="cd" * 32),
    ]
    for first in range(len(orders)):
        for second in range(first):
            same = sum(a == b for a, b in zip(orders[first], orders[second], strict=True))
            assert same < 12  # two random permutations agree in one place on average


def test_an_order_is_shuffled_and_not_merely_permuted() -> None:
    order = np.array(ids(0, 4096, n=4096))
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.06
    steps = np.diff(order)
    assert (np.abs(steps) < 64).mean() < 0.06  # 0.031 expected


def test_a_position_far_into_a_huge_dataset_is_found_at_once() -> None:
    n = 2 * 10**9
    found = sample_ids(DIGEST, n=n, seed=3, learner="east", positions=np.arange(10**15, 10**15 + 512))
    assert len(set(found.tolist())) == 512
    assert found.min() >= 0
    assert found.max() < n


def test_the_order_never_changes_between_versions() -> None:
    """A checkpoint holds a cursor only: changing this function would silently change what a resumed run sees."""
    assert ids(0, 8, n=10) == WANT_FIRST_EIGHT


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        ids(0, 1, n=0)


WANT_FIRST_EIGHT = [8, 1, 6, 0, 7, 5, 2, 4]
