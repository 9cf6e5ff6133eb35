"""Real images are put in an order that shards cannot change, and cut into two alike halves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.evaluate.reference import Images, balanced_choice, coarse, halves, load_splits
from services.prepare.__main__ import prepare
from spec.errors import DataError
from spec.shards import open_manifest

labels = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(lambda values: np.array(values, dtype=np.int64))


@settings(max_examples=60, deadline=None)
@given(labels)
def test_halves_are_disjoint_and_hold_the_same_labels(values: np.ndarray) -> None:
    first, second = halves(values)
    assert not set(first.tolist()) & set(second.tolist())
    assert sorted(values[first].tolist()) == sorted(values[second].tolist())
    assert len(values) - 2 * len(first) == sum(np.bincount(values) % 2)


@settings(max_examples=40, deadline=None)
@given(labels, st.integers(0, 1000), st.data())
def test_a_choice_depends_on_content_and_not_on_order(values: np.ndarray, seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (len(values), 2, 2, 1), dtype=np.uint8)
    order = random.permutation(len(values))
    count = data.draw(st.integers(1, len(values)))
    here = balanced_choice(pixels, labels=values.tolist(), count=count)
    there = balanced_choice(pixels[order], labels=values[order].tolist(), count=count)
    assert [image.tobytes() for image in pixels[here]] == [image.tobytes() for image in pixels[order][there]]
    assert len(set(here.tolist())) == count


def test_a_choice_takes_labels_in_turn() -> None:
    values = [0] * 30 + [1] * 3 + [2] * 30
    pixels = np.random.default_rng(0).integers(0, 256, (63, 2, 2, 1), dtype=np.uint8)
    chosen = balanced_choice(pixels, labels=values, count=9)
    assert np.bincount(np.array(values)[chosen]).tolist() == [3, 3, 3]


def test_shards_of_another_size_give_the_same_images(tmp_path: Path) -> None:
    splits: list[Images] = []
    for size in (100, 256):
        uri = (tmp_path / str(size) / "manifest.json").as_uri()
        prepare(uri, source="sklearn-digits", shard_samples=size, lock_timeout_seconds=30)
        splits.append(load_splits(uri, cache=tmp_path)[1])
    assert (splits[0].pixels == splits[1].pixels).all()
    assert (splits[0].labels == splits[1].labels).all()


def test_of_a_large_dataset_some_images_are_taken_evenly_and_a_corrupt_shard_is_refused(tmp_path: Path) -> None:
    uri = (tmp_path / "manifest.json").as_uri()
    prepare(uri, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    whole, some = load_splits(uri, cache=tmp_path)[0], load_splits(uri, cache=tmp_path, most=100)[0]
    assert len(some) == 100
    places = [int(np.flatnonzero((whole.pixels == one).all(axis=(1, 2, 3)))[0]) for one in some.pixels]
    gaps = np.diff(places)
    assert (gaps.min(), gaps.max()) == (len(whole) // 100, len(whole) // 100 + 1)
    shard = tmp_path / open_manifest(uri).splits.test[0].path
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="corrupt"):
        load_splits(uri, cache=tmp_path)


@pytest.mark.parametrize(("height", "width", "small"), [(32, 99, (32, 99)), (33, 64, (16, 32)), (256, 130, (64, 32))])
def test_large_images_become_the_mean_of_their_pixels(height: int, width: int, small: tuple[int, int]) -> None:
    pixels = np.random.default_rng(height).integers(0, 256, (3, height, width, 3), dtype=np.uint8)
    found = coarse(pixels)
    assert found.shape == (3, *small, 3)
    times = height // small[0]
    part = pixels[:, : small[0] * times, : small[1] * times].reshape(3, small[0], times, small[1], times, 3)
    assert abs(found - part.mean(axis=(2, 4))).max() <= 0.5 * max(1, np.log2(times)) + 1e-9
    assert (coarse(pixels[1]) == found[1]).all()
