"""Which size an image is brought to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.buckets import Bucket, equal_cost, make_sizes
from storage.index import ITEM
from training.data.buckets import assign, bucket_codes, join_rare


def test_sizes_of_an_area_are_what_image_trainers_use() -> None:
    sizes = make_sizes(512 * 512, step=64, most_aspect=2)
    assert (512, 512) in sizes
    assert sizes == sorted(sizes, key=lambda size: size[0] / size[1])
    assert {(h, w) for w, h in sizes} == set(sizes)
    assert sizes[0] == (384, 640)


@given(step=st.sampled_from([8, 16, 64]), side=st.integers(64, 1024), aspect=st.floats(1, 5))
def test_sizes_fit_their_area_and_aspect(step: int, side: int, aspect: float) -> None:
    sizes = make_sizes(side * side, step=step, most_aspect=aspect)
    assert sizes
    for width, height in sizes:
        assert width % step == height % step == 0
        assert width * height <= side * side
        assert max(width / height, height / width) <= aspect
        assert (width + step) * height > side * side or (width + step) / height > aspect


def test_an_image_goes_to_the_nearest_aspect_by_ratio() -> None:
    buckets = [Bucket(64, 64, 1), Bucket(128, 64, 1), Bucket(64, 128, 1)]
    sizes = np.array([[100, 100], [300, 100], [100, 300], [141, 100], [142, 100], [100, 142], [8, 9000]])
    assert assign(sizes[:, 0], sizes[:, 1], buckets=buckets).tolist() == [0, 1, 2, 0, 1, 2, 2]
    assert assign(sizes[:, 0], sizes[:, 1], buckets=buckets[:1]).tolist() == [0] * 7


def test_batches_of_equal_cost() -> None:
    found = equal_cost([(512, 512), (1024, 1024), (4096, 4096)], pixels=512 * 512 * 64, multiple=8)
    assert [one.batch for one in found] == [64, 16, 8]


@given(counts=st.lists(st.integers(0, 100), min_size=1, max_size=8), least=st.integers(1, 120))
def test_rare_buckets_are_joined_and_nobody_is_dropped(counts: list[int], least: int) -> None:
    buckets = [Bucket(64 * (number + 1), 256, 1) for number in range(len(counts))]
    target = join_rare(counts, buckets=buckets, least=least)
    joined = {int(one): 0 for one in target}
    for number, count in enumerate(counts):
        joined[int(target[number])] += count
    assert sum(joined.values()) == sum(counts)
    assert len(joined) == 1 or min(joined.values()) >= least
    assert all(target[one] == one for one in joined)


def test_the_rarest_joins_its_neighbour() -> None:
    """Report kohya_ss#3457: small buckets were dropped without a word."""
    buckets = [Bucket(256, 512, 1), Bucket(512, 512, 1), Bucket(512, 256, 1)]
    assert join_rare([2, 100, 50], buckets=buckets, least=8).tolist() == [1, 1, 2]


@pytest.mark.parametrize(("area", "step", "aspect"), [(10, 64, 2), (4096, 0, 2), (4096, 64, 0.5)])
def test_sizes_that_cannot_be_are_refused(area: int, step: int, aspect: float) -> None:
    with pytest.raises(ValueError, match="no size"):
        make_sizes(area, step=step, most_aspect=aspect)


def test_buckets_of_a_whole_index_take_one_byte_each() -> None:
    rows = np.zeros(100, dtype=ITEM)
    rows["width"], rows["height"] = np.arange(100) + 64, 64
    found = bucket_codes(rows, buckets=[Bucket(64, 64, 1), Bucket(128, 64, 1)])
    assert found.dtype == np.uint8
    assert found.tolist() == [0 if width <= 64 * 2**0.5 else 1 for width in range(64, 164)]
