"""Coverage: every element of every tensor exactly once, or the first place where not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.checkpoint.documents import Part, Range, coverage_gap


def _part(rank: int, *ranges: Range) -> Part:
    return Part(rank=rank, file="f", bytes=0, sha256="", vectors=["model"], ranges=list(ranges))


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    ranks=st.integers(1, 6),
    seed=st.integers(0, 1000),
    harm=st.sampled_from(["none", "drop", "repeat"]),
)
def test_any_cut_covers_and_any_harm_to_it_shows(sizes: list[int], ranks: int, seed: int, harm: str) -> None:
    draw = random.Random(seed)
    shapes = {f"t{index}": [size] for index, size in enumerate(sizes)}
    ranges: list[list[Range]] = [[] for _ in range(ranks)]
    for name, (size,) in shapes.items():
        edges = [0, *sorted(draw.randint(0, size) for _ in range(ranks - 1)), size]
        for rank in range(ranks):
            ranges[rank].append((name, edges[rank], edges[rank + 1] - edges[rank]))
    filled = [(rank, one) for rank, own in enumerate(ranges) for one in own if one[2]]
    if harm != "none" and filled:
        rank, one = draw.choice(filled)
        ranges[rank].remove(one) if harm == "drop" else ranges[rank].append(one)
    parts = [_part(rank, *own) for rank, own in enumerate(ranges)]
    draw.shuffle(parts)
    assert bool(coverage_gap(shapes, parts=parts)) == (harm != "none" and bool(filled))


@pytest.mark.parametrize(
    ("parts", "gap"),
    [
        ([_part(0, ("a", 0, 4))], "'a' ends at element 4 of 6"),
        ([_part(0, ("a", 0, 2)), _part(1, ("a", 3, 3))], "nobody wrote 'a' from element 2"),
        ([_part(0, ("a", 0, 4)), _part(1, ("a", 2, 4))], "rank 1 wrote again 'a' from element 2"),
        ([_part(0, ("a", 0, 6)), _part(3, ("b", 0, 1))], "rank 3 wrote 'b', which is no tensor of the model"),
    ],
)
def test_the_gap_is_named(parts: list[Part], gap: str) -> None:
    assert coverage_gap({"a": [2, 3]}, parts=parts) == gap
