"""The plan of batches: complete, of one shape each, the same from any start and for any world size."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.mixture import Mixture, Segment
from training.data.plan import Plan, Source, Start, rank_slice


def plan(sizes: list[int], *, batches: list[int], weights: tuple[int, ...] | None = None, window: int = 64,
         seed: int = 0, starts: list[Start] | None = None, learner: str = "east") -> Plan:  # fmt: skip
    generator = np.random.default_rng(7)
    sources = [
        Source(f"{number:064d}", n, generator.integers(0, len(batches), n).astype(np.int16))
        for number, n in enumerate(sizes)
    ]
    mixture = Mixture([Segment(0, weights or (1,) * len(sizes))])
    return Plan(sources, mixture=mixture, seed=seed, learner=learner, batches=batches, window=window,
                starts=starts or [])  # fmt: skip


def run(made: Plan, *, first: int = 0, count: int) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """So many batches from a position on: (position, bucket, samples)."""
    found: list[tuple[int, int, list[tuple[int, int, int]]]] = []
    for _ in range(count):
        batch = made.batch(first)
        rows = zip(batch.refs.source.tolist(), batch.refs.sample.tolist(), batch.refs.epoch.tolist(), strict=True)
        found.append((first, batch.bucket, list(rows)))
        first += len(batch.refs)
    return found


@given(sizes=st.lists(st.integers(5, 90), min_size=1, max_size=3), batches=st.lists(st.integers(1, 9), min_size=2,
       max_size=5), window=st.integers(9, 100), seed=st.integers(0, 9))  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_every_sample_of_the_stream_is_in_one_batch_of_its_own_bucket(
    sizes: list[int], batches: list[int], window: int, seed: int
) -> None:
    made = plan(sizes, batches=batches, window=window, seed=seed)
    start = Start(0, 0)
    seen: Counter[int] = Counter()
    for number in range(4):
        one = made._make(start)
        assert len(one.after.carry) <= sum(size - 1 for size in batches)
        for index, bucket in enumerate(one.buckets):
            places = one.places[one.firsts[index] : one.firsts[index + 1]]
            assert len(places) == batches[bucket]
            assert set(made._codes(made.refs(places)).tolist()) == {bucket}
        seen.update(one.places.tolist())
        # No third case: a place of the stream was used once, or is carried.
        assert sorted([*seen.elements(), *one.after.carry]) == list(range((number + 1) * window))
        start = one.after


@given(cut=st.integers(0, 39), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_a_plan_that_resumes_goes_on_as_one_that_never_stopped(cut: int, seed: int) -> None:
    """Report 3 (huggingface/datasets#7901): what a shuffle had buffered is neither lost nor given twice."""
    sizes, batches = [50, 31], [3, 4, 5]
    whole = run(plan(sizes, batches=batches, seed=seed), count=40)
    before = plan(sizes, batches=batches, seed=seed)
    run(before, count=cut)
    position = whole[cut][0]
    kept = [Start.from_json(one.to_json()) for one in before.starts(position)]
    after = plan(sizes, batches=batches, seed=seed, starts=kept)
    assert run(after, first=position, count=40 - cut) == whole[cut:]
    # From nothing but the position, and once more from a checkpoint that a resumed run wrote (I10).
    assert run(plan(sizes, batches=batches, seed=seed), first=position, count=40 - cut) == whole[cut:]
    again = plan(sizes, batches=batches, seed=seed, starts=after.starts(whole[-1][0]))
    assert run(again, first=whole[-1][0], count=1) == whole[-1:]


def test_a_learner_that_goes_back_a_little_finds_its_place_from_kept_starts() -> None:
    made = plan([5000], batches=[3, 4], window=64)
    whole = run(made, count=400)
    kept = made.starts(whole[-1][0])
    assert 1 < len(kept) <= 8
    back = next(position for position, _, _ in whole if position >= kept[0].position)
    assert run(plan([5000], batches=[3, 4], window=64, starts=kept), first=back, count=1)[0] in whole


def test_one_bucket_is_the_plain_order() -> None:
    made = plan([20], batches=[4])
    samples = [row[1] for _, _, rows in run(made, count=10) for row in rows]
    assert sorted(samples[:20]) == list(range(20))
    assert sorted(samples[20:]) == list(range(20))
    assert samples[:20] != samples[20:]
    assert made.starts(40) == []
    moved = plan([20], batches=[6]).batch(2)  # the size of batches changed between two attempts
    assert moved.refs.sample.tolist() == samples[2:8]


def test_later_epochs_are_whole_wherever_a_run_stopped() -> None:
    """Reports 1, 2 and 8 (meta-pytorch/data#1437, huggingface/datasets#7447, litData#316).

    The epoch after a resume is a new permutation of everything, not the rest of the one before, and its number goes on.
    """
    for cut in range(10):
        made = plan([20], batches=[4])
        rest = run(made, first=4 * cut, count=15 - cut)
        rows = [row for _, _, some in rest for row in some]
        for epoch in range(cut // 5 + 1, 3):
            assert sorted(sample for _, sample, e in rows if e == epoch) == list(range(20))


def test_weighted_sources_go_on_where_each_of_them_was() -> None:
    """Report 9 (litData#213)."""
    made = plan([30, 7], batches=[5], weights=(3, 1))
    rows = [row for _, _, some in run(made, first=40, count=40) for row in some]
    for source, n in enumerate((30, 7)):
        own = [(epoch, sample) for s, sample, epoch in rows if s == source]
        assert len(set(own)) == len(own)
        assert Counter(epoch for epoch, _ in own).most_common(1)[0][1] <= n


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_share_a_batch_without_repeats_at_any_world_size(world: int) -> None:
    """Reports 4 and 5 (accelerate#3938, torchtitan#811): a changed world size goes on in the same global order."""
    made = plan([50], batches=[8, 8])
    for position, _, rows in run(made, count=12):
        refs = made.batch(position).refs
        parts = [refs[rank_slice(len(refs), rank=rank, world_size=world)].sample.tolist() for rank in range(world)]
        assert list(itertools.chain(*parts)) == [sample for _, sample, _ in rows]


@given(count=st.integers(1, 70), world=st.integers(1, 16))
def test_slices_cover_a_batch_once_and_differ_by_at_most_one(count: int, world: int) -> None:
    if count < world:
        with pytest.raises(ValueError, match="make batches larger"):
            rank_slice(count, rank=0, world_size=world)
        return
    found = [rank_slice(count, rank=rank, world_size=world) for rank in range(world)]
    assert [one.start for one in found[1:]] == [one.stop for one in found[:-1]]
    assert (found[0].start, found[-1].stop) == (0, count)
    assert {one.stop - one.start for one in found} <= {count // world, count // world + 1}


def test_digests_tell_plans_apart_and_marks_their_batches() -> None:
    one, other = plan([50], batches=[3, 4]), plan([50], batches=[3, 4], seed=1)
    assert one.digest != other.digest
    assert one.digest != plan([50], batches=[3, 4], learner="west").digest
    assert one.digest == plan([50], batches=[3, 4]).digest
    assert one.batch(0).mark == plan([50], batches=[3, 4]).batch(0).mark != other.batch(0).mark
    following = len(one.batch(0).refs)
    assert one.batch(following).mark != one.batch(0).mark
    # Another row of the same dataset: what a table of buckets that was damaged on one machine would give.
    table = np.zeros(50, dtype=np.int16)
    damaged = table.copy()
    damaged[plan([50], batches=[3]).batch(0).refs.sample[0]] = 1
    sources = [Source("0" * 64, 50, one) for one in (table, damaged)]
    made = [
        Plan([one], mixture=Mixture([Segment(0, (1,))]), seed=0, learner="east", batches=[3, 4], window=64)
        for one in sources
    ]
    assert made[0].digest == made[1].digest
    assert made[0].batch(0).mark != made[1].batch(0).mark


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": (1, 1)}, "2 weights for 1 sources"),
        ({"batches": [0, 1]}, "batches of"),
        ({"window": 3}, "windows of 3"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan([50], **({"batches": [4, 4]} | change))  # type: ignore[arg-type]
