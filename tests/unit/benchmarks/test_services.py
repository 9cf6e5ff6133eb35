"""What the benchmarks of services make of their raw numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks._services import quantile
from benchmarks.service_fairness import summary
from benchmarks.service_frechet import cut, running, textbook
from benchmarks.service_kill import AFTER_SECONDS, pauses


def test_a_pause_is_the_longest_time_without_a_reply_after_a_kill_and_before_the_next() -> None:
    assert pauses([0.5, 1.5, 1.6, 10.1, 10.2], [1.0]) == pytest.approx([AFTER_SECONDS - 0.6])
    assert pauses([9.9, 10.4, 10.6, 11.5], [10.0, 11.0]) == pytest.approx([0.4, AFTER_SECONDS - 0.5])
    assert pauses([], [1.0]) == [AFTER_SECONDS]


def test_equal_shares_are_one_and_one_rank_that_gets_all_is_one_of_them() -> None:
    assert summary([[0.1] * 5, [0.2] * 5])["jain"] == pytest.approx(1)
    found = summary([[0.1] * 6, [], []])
    assert found["jain"] == pytest.approx(1 / 3)
    assert (found["replies"], found["p99_ms"]) == (6, pytest.approx(100))
    assert summary([[]])["jain"] == 0
    assert math.isnan(quantile([], 0.5))


def test_every_image_is_in_one_call_of_a_cut_and_both_ways_to_the_distance_agree_near_zero() -> None:
    random = np.random.default_rng(0)
    first, second = random.normal(size=(60, 3)), random.normal(size=(60, 3)) + 1
    calls = list(cut(60, size=7, shards=4, random=random))
    assert sorted(place for _, _, places in calls for place in places) == list(range(60))
    assert len({(shard, sequence) for shard, sequence, _ in calls}) == len(calls)
    batches = [first[places] for _, _, places in calls]
    assert running(batches, second) == pytest.approx(textbook(first, second), rel=1e-4)
