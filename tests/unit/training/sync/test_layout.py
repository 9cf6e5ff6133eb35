from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.sync.layout import (
    Layout,
    combine_fingerprints,
    count,
    find_gap,
    find_range_problem,
    fingerprint_weights,
    gather,
    intersect,
    scatter,
    shift,
)


def test_the_layout_does_not_depend_on_the_order_of_parameters() -> None:
    first, second = Layout.from_shapes({"b": [2, 3], "a": [4]}), Layout.from_shapes({"a": (4,), "b": (2, 3)})
    assert first == second
    assert first.fingerprint == second.fingerprint
    assert (first.total, first.offset("a"), first.offset("b")) == (10, 0, 4)


def test_the_fingerprint_tells_shapes_apart() -> None:
    shapes = ([6], [2, 3], [3, 2], [])
    assert len({Layout.from_shapes({"a": shape}).fingerprint for shape in shapes}) == 4


def test_a_layout_reads_back_its_own_shapes() -> None:
    layout = Layout.from_shapes({"a": [2, 3], "scalar": []})
    assert Layout.from_shapes(layout.shapes()) == layout


def test_an_empty_or_negative_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Layout.from_shapes({})
    with pytest.raises(ValueError, match="impossible shape"):
        Layout.from_shapes({"a": [-1]})


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        ([(0, 4), (4, 6)], ""),
        ([(4, 6), (0, 4), (2, 0)], ""),
        ([(0, 4), (5, 5)], "elements 4 to 4 are missing"),
        ([(0, 9)], "elements 9 to 9 are missing"),
        ([(0, 6), (4, 6)], "element 4 is covered twice"),
        ([(0, 11)], "outside"),
        ([(-1, 11)], "outside"),
        ([], "elements 0 to 9 are missing"),
    ],
)
def test_coverage_names_what_is_wrong(ranges: list[tuple[int, int]], problem: str) -> None:
    found = find_gap(ranges, total=10)
    assert problem in found
    assert bool(problem) == bool(found)


@given(cuts=st.sets(st.integers(1, 99)), seed=st.integers(0, 100), ranks=st.integers(1, 5))
def test_any_split_over_ranks_is_put_together_again(cuts: set[int], seed: int, ranks: int) -> None:
    edges = [0, *sorted(cuts), 100]
    pieces = [(start, end - start) for start, end in itertools.pairwise(edges)]
    flat, again = np.random.default_rng(seed).standard_normal(100).astype(np.float32), np.zeros(100, np.float32)
    shards = [pieces[rank::ranks] for rank in range(ranks)]
    assert find_gap([one for shard in shards for one in shard], total=100) == ""
    for shard in shards:
        assert find_range_problem(shard, total=100) == ""
        part = gather(flat, shard)
        assert len(part) == count(shard)
        scatter(again, shard, part)
    assert fingerprint_weights(again) == fingerprint_weights(flat)


def test_the_fingerprint_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="float32"):
        fingerprint_weights(np.zeros(3))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("fragments", [1, 2, 3, 7])
def test_fragments_are_equally_large_and_cover_everything_once(fragments: int) -> None:
    layout = Layout.from_shapes({"b": [5], "a": [3, 3]}, buffers={"mean": [4]}, fragments=fragments)
    ranges = [layout.fragment_range(one) for one in range(fragments)]
    assert find_gap(ranges, total=18) == ""
    assert max(length for _, length in ranges) - min(length for _, length in ranges) <= 1
    assert sum(layout.trainable_in(one) for one in range(fragments)) == layout.trainable == 14
    assert layout.offset("mean") == 14, "buffers lie behind all parameters"
    with pytest.raises(ValueError, match="no fragment"):
        layout.fragment_range(fragments)


def test_the_fingerprint_knows_buffers_and_the_cut() -> None:
    shapes = {"a": [4], "b": [4]}
    layouts = [
        Layout.from_shapes(shapes),
        Layout.from_shapes(shapes, fragments=2),
        Layout.from_shapes({"a": [4]}, buffers={"b": [4]}),
    ]
    assert len({one.fingerprint for one in layouts}) == 3
    with pytest.raises(ValueError, match="cannot be cut into 9 fragments"):
        Layout.from_shapes(shapes, fragments=9)
    with pytest.raises(ValueError, match="both a parameter and a buffer"):
        Layout.from_shapes(shapes, buffers={"a": [4]})


def test_ranges_are_cut_to_a_fragment_and_counted_from_its_start() -> None:
    ranges = [(0, 4), (6, 3), (12, 2)]
    assert intersect(ranges, (2, 6)) == [(2, 2), (6, 2)]
    assert intersect(ranges, (4, 2)) == []
    assert shift(intersect(ranges, (2, 6)), -2) == [(0, 2), (4, 2)]
    assert find_range_problem([(2, 2)], total=6, first=3) == "range (2, 2) lies outside the 6 elements from 3 on"
    assert find_gap([(3, 2), (6, 3)], total=6, first=3) == "elements 5 to 5 are missing"


def test_the_digest_of_one_fragment_is_that_of_the_whole() -> None:
    assert combine_fingerprints(["ab"]) == "ab"
    assert combine_fingerprints([]) == ""
    assert combine_fingerprints(["ab", "cd"]) != combine_fingerprints(["cd", "ab"])
