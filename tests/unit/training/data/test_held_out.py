"""Held-out samples are the test split's, in its order, and no more than there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spec.errors import DataError
from spec.shards import path_of, read_samples
from spec.train import ModelConfig
from tests.builders.object_store import environment_of, serve_objects
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.data.audit import audit
from training.data.held_out import held_out, held_out_text
from training.data.loader import Loader


def test_held_out_samples_come_in_the_order_of_the_split(dataset: str) -> None:
    images, labels, captions = held_out(dataset, count=5, start=3)
    want = list(read_samples(dataset, split="test"))[3:8]
    assert captions == [sample.caption for sample in want]
    assert labels.tolist() == [sample.label for sample in want]
    assert images.shape == (5, 1, 4, 4)
    pixels = np.rint((images[0] + 1) * 127.5).astype(np.uint8)
    assert pixels.tobytes() == want[0].pixels


def test_text_is_the_samples_bytes(dataset: str) -> None:
    want = b"".join(sample.pixels for sample in list(read_samples(dataset, split="test"))[:5])
    text = held_out_text(dataset, count=5)
    assert (text.shape, text.tobytes()) == ((5, 16), want)


def test_of_more_than_there_are_come_all_and_none_is_an_error(dataset: str) -> None:
    assert len(held_out(dataset, count=41).labels) == len(held_out_text(dataset, count=41)) == 40
    assert held_out(dataset, count=9, start=35).images.shape == (5, 1, 4, 4)
    with pytest.raises(DataError, match="no held-out sample from number 40 on") as caught:
        held_out(dataset, count=1, start=40)
    assert "--held-out" in caught.value.hint


def test_a_dataset_in_a_bucket_gives_the_same_samples_and_batches(dataset: str, tmp_path: Path) -> None:
    options = {
        "seed": 1, "learner": "east", "start_position": 0, "batch": 12, "rank": 1, "world_size": 2, "workers": 0,
        "prefetch": 1, "model": ModelConfig(image_size=4, channels=1, patch_size=2),
    }  # fmt: skip
    with serve_objects(tmp_path) as server, environment_of(server):
        bucket = server.open()
        for path in path_of(dataset).parent.iterdir():
            bucket.send(path.name, path)
        uri, cache = f"{bucket.uri}/manifest.json", tmp_path / "cache"
        there, here = held_out(uri, count=7, cache=cache), held_out(dataset, count=7)
        assert there.captions == here.captions
        np.testing.assert_array_equal(there.images, here.images)
        assert not list(cache.glob("*/train-*.shard")), "only the test split was fetched"
        with Loader(uri, cache=cache, **options) as copied, Loader(dataset, **options) as original:  # type: ignore[arg-type]
            one, other = copied.next(20), original.next(20)
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(one.noise, other.noise)
        assert (one.ids, one.captions) == (other.ids, other.captions)
        assert audit(uri, cache=cache) == audit(dataset)


def test_encoded_images_come_in_the_wanted_shape_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    some = [Picture(encoded(picture(number, width=20, height=30)), 20, 30) for number in range(12)]
    some[8] = some[8]._replace(data=some[8].data[:100])
    uri = make_tar_dataset(tmp_path / "pictures", train=some[:6], test=some[6:])
    images, labels, captions = held_out(uri, count=4, start=1, shape=(16, 16, 3))
    assert images.shape == (4, 3, 16, 16)
    assert captions == [f"picture {number}" for number in (7, 9, 10, 11)]
    assert labels.tolist() == [0, 2, 3, 4]
    assert len(held_out(uri, count=9, start=1, shape=(16, 16, 3)).labels) == 4
    with pytest.raises(DataError, match="no held-out sample from number 6 on that can be used"):
        held_out(uri, count=5, start=6, shape=(16, 16, 3))
    with pytest.raises(DataError, match="size has to be said"):
        held_out(uri, count=1)
