"""Sums of samples: any order and any split over ranks gives the same, any exchange another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.account import Sum, account
from training.data.plan import Refs

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**40), st.integers(0, 99)), min_size=1, max_size=40)


def refs(of: list[tuple[int, int, int]]) -> Refs:
    source, sample, epoch = (np.array(column, dtype=np.int64) for column in zip(*of, strict=True))
    return Refs(source, sample, epoch)


@given(of=rows, data=st.data())
def test_order_and_split_do_not_matter(of: list[tuple[int, int, int]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(of))
    cut = data.draw(st.integers(0, len(of)))
    parts = [account(refs(part)) for part in (shuffled[:cut], shuffled[cut:]) if part]
    assert sum(parts, Sum()) == account(refs(of))
    assert Sum.parse(len(of), account(refs(of)).text) == account(refs(of))


@given(of=rows, at=st.integers(0, 39), field=st.integers(0, 2), by=st.integers(1, 5))
def test_one_sample_exchanged_is_another_sum(of: list[tuple[int, int, int]], at: int, field: int, by: int) -> None:
    other = [list(row) for row in of]
    other[at % len(of)][field] += by
    changed = [tuple(row) for row in other]
    assert account(refs(changed)) != account(refs(of))  # type: ignore[arg-type]


def test_equal_parts_do_not_cancel() -> None:
    """Two of the same sample are not none of it, and (source, epoch, sample) are not interchangeable."""
    twice = account(refs([(0, 5, 0), (0, 5, 0)]))
    assert (twice.low, twice.high) != (0, 0)
    assert account(refs([(1, 2, 3)])) != account(refs([(1, 3, 2)]))
    assert account(refs([(2, 2, 1)])) != account(refs([(1, 2, 2)]))


def test_what_is_no_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="32 hexadecimal"):
        Sum.parse(1, "ab")
