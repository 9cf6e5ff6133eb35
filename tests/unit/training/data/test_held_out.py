"""Held-out samples are the test split's, in its order, and no more than there are."""

from __future__ import annotations

import numpy as np
import pytest

from spec.errors import DataError
from spec.shards import read_samples
from training.data.held_out import held_out


def test_held_out_samples_come_in_the_order_of_the_split(dataset: str) -> None:
    images, labels, captions = held_out(dataset, count=5, start=3)
    want = list(read_samples(dataset, split="test"))[3:8]
    assert captions == [sample.caption for sample in want]
    assert labels.tolist() == [sample.label for sample in want]
    assert images.shape == (5, 1, 4, 4)
    pixels = np.rint((images[0] + 1) * 127.5).astype(np.uint8)
    assert pixels.tobytes() == want[0].pixels


def test_more_than_there_are_is_refused(dataset: str) -> None:
    with pytest.raises(DataError, match="the dataset has 40") as caught:
        held_out(dataset, count=41)
    assert "at most 40" in caught.value.hint
