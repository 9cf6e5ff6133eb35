"""What a loader delivers depends on its place in the order alone, and what it cannot deliver it explains."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.prepare import store
from services.prepare.packing import Content, Samples, pack
from spec.errors import ConfigError, DataError
from spec.shards import Sample, Shape, open_manifest, path_of
from spec.train import LanguageModelConfig, ModelConfig
from training.data.loader import Loader, LocalBatch
from training.data.plan import Refs

MODEL = ModelConfig(image_size=4, channels=1)
ARRAYS = ("images", "text", "labels", "embeddings", "noise", "time", "drop")
REFS = ("source", "sample", "epoch")
SECONDS = 30.0
DESCRIPTORS = Path("/proc/self/fd")


def a_loader(dataset: str, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {
        "seed": 3, "learner": "east", "start_position": 0, "batch": 16, "rank": 0, "world_size": 1, "workers": 0,
        "prefetch": 4, "model": MODEL,
    }  # fmt: skip
    return Loader(dataset, **(arguments | changes))


def batches(dataset: str, count: int, **changes: Any) -> list[LocalBatch]:
    with a_loader(dataset, **changes) as loader:
        return [loader.next(SECONDS) for _ in range(count)]


def assert_same(got: Sequence[LocalBatch], want: Sequence[LocalBatch]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one.position, one.ids, one.captions) == (other.position, other.ids, other.captions)
        pairs = [(getattr(one, name), getattr(other, name)) for name in ARRAYS]
        for left, right in [*pairs, *((getattr(one.refs, name), getattr(other.refs, name)) for name in REFS)]:
            assert left.dtype == right.dtype
            assert left.shape == right.shape
            assert left.tobytes() == right.tobytes()


def joined(parts: Sequence[LocalBatch]) -> LocalBatch:
    """The whole batch of a learner from its ranks' slices."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    return LocalBatch(
        position=parts[0].position,
        captions=[caption for part in parts for caption in part.captions],
        ids=[number for part in parts for number in part.ids],
        refs=Refs(*(np.concatenate([getattr(part.refs, name) for part in parts]) for name in REFS)),
        whole=parts[0].whole,
        mark=parts[0].mark,
        **arrays,
    )


def test_a_batch_has_the_promised_types_and_ranges(dataset: str) -> None:
    (batch,) = batches(dataset, 1)
    assert batch.images.shape == batch.noise.shape == (16, 1, 4, 4)
    assert batch.images.dtype == batch.noise.dtype == batch.time.dtype == np.float32
    assert (batch.labels.dtype, batch.drop.dtype) == (np.int64, np.bool_)
    assert -1 <= batch.images.min() < -0.9
    assert 0.9 < batch.images.max() <= 1
    assert batch.captions == [f"number {number}, é" for number in batch.ids]
    assert batch.labels.tolist() == [number % 10 for number in batch.ids]


def test_every_epoch_gives_every_sample_once_though_batches_cross_its_end(dataset: str) -> None:
    ids = [number for batch in batches(dataset, 30) for number in batch.ids]
    first, second, third = ids[:150], ids[150:300], ids[300:450]
    assert sorted(first) == sorted(second) == sorted(third) == list(range(150))
    assert first != second != third


@pytest.mark.parametrize("start", [16, 160, 16 * 1000, 7])
def test_a_resumed_loader_goes_on_bit_for_bit(dataset: str, start: int) -> None:
    """A cursor is all there is to resume from; also within and across epochs, and twice in one epoch."""
    whole = batches(dataset, 6, start_position=start)
    resumed = batches(dataset, 2, start_position=start + 16) + batches(dataset, 3, start_position=start + 48)
    assert_same(resumed, whole[1:])


def test_far_positions_cost_no_more_than_near_ones(dataset: str) -> None:
    (far,) = batches(dataset, 1, start_position=10**15)
    assert len(set(far.ids)) == 16


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_deliver_what_the_rank_itself_would_have_prepared(dataset: str, workers: int) -> None:
    assert_same(batches(dataset, 25, workers=workers), batches(dataset, 25))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_of_any_world_size_see_the_same_batches_together(dataset: str, world_size: int) -> None:
    parts = [batches(dataset, 12, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert_same([joined(slices) for slices in zip(*parts, strict=True)], batches(dataset, 12))


def test_learners_and_seeds_draw_different_samples_and_noise(dataset: str) -> None:
    (one,), (other,), (seeded,) = (batches(dataset, 1, **changes) for changes in ({}, {"learner": "west"}, {"seed": 4}))
    assert one.ids != other.ids != seeded.ids
    assert len({round(float(noise), 6) for batch in (one, other, seeded) for noise in batch.noise[:, 0, 0, 0]}) == 48


def test_noise_and_time_are_new_in_every_epoch_and_for_every_sample(dataset: str) -> None:
    drawn = np.concatenate([batch.noise.reshape(16, -1) for batch in batches(dataset, 30)])
    assert len(np.unique(drawn[:, 0])) > 475  # float32 collisions are possible, repetition is not
    assert abs(drawn.mean()) < 0.05
    assert abs(drawn.std() - 1) < 0.05


def test_time_is_uniform_or_logit_normal_and_drop_has_its_share(dataset: str) -> None:
    uniform = batches(dataset, 40, batch=50)
    time = np.concatenate([batch.time for batch in uniform])
    assert 0 <= time.min() < 0.01 < 0.99 < time.max() < 1
    assert np.quantile(time, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.04)
    assert np.concatenate([batch.drop for batch in uniform]).mean() == pytest.approx(0.1, abs=0.025)
    bell = np.concatenate([batch.time for batch in batches(dataset, 40, batch=50, time_distribution="logit-normal")])
    logit = np.log(bell / (1 - bell))
    assert (logit.mean(), logit.std()) == pytest.approx((0, 1), abs=0.08)


def test_no_more_is_prepared_ahead_than_was_asked_for(dataset: str) -> None:
    with a_loader(dataset, workers=2, prefetch=3) as loader:
        for _ in range(3):
            with loader._changed:
                assert loader._changed.wait_for(lambda: loader.ready == 3, SECONDS)
                held = sum(len(worker.tickets) for worker in loader._workers)
                assert (len(loader._done), held) == (3, 0)
            loader.next(SECONDS)


def test_descriptors_stay_constant_over_many_batches(dataset: str) -> None:
    with a_loader(dataset, workers=2) as loader:
        kept = [loader.next(SECONDS) for _ in range(5)]
        gc.collect()  # what earlier tests of this process left open
        before = len(list(DESCRIPTORS.iterdir()))
        kept += [loader.next(SECONDS) for _ in range(60)]
        assert len(list(DESCRIPTORS.iterdir())) <= before
    assert_same(kept, batches(dataset, 65))  # batches that are kept are not overwritten by later ones


def test_arrays_may_be_written_to(dataset: str) -> None:
    """torch.from_numpy warns about memory that is read-only."""
    (batch,) = batches(dataset, 1, workers=1)
    assert all(getattr(batch, name).flags.writeable for name in ARRAYS)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_shard_is_an_error_at_its_place_and_never_a_gap(dataset: str, workers: int) -> None:
    want = batches(dataset, 30)
    path = path_of(dataset).parent / open_manifest(dataset).splits.train[1].path
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    first = next(step for step, batch in enumerate(want) if any(64 <= number < 128 for number in batch.ids))
    with a_loader(dataset, workers=workers) as loader:
        assert_same([loader.next(SECONDS) for _ in range(first)], want[:first])
        for _ in range(2):
            with pytest.raises(DataError, match="corrupt") as caught:
                loader.next(SECONDS)
            assert caught.value.where == str(path)
            assert "prepare" in caught.value.hint
        assert loader.position == first * 16


def test_a_shard_damaged_while_it_is_open_is_noticed(dataset: str) -> None:
    with a_loader(dataset) as loader:
        for _ in range(10):
            loader.next(SECONDS)  # every shard was opened and found good
        for shard in open_manifest(dataset).splits.train:
            path = path_of(dataset).parent / shard.path
            os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(DataError, match="truncated"):
            [loader.next(SECONDS) for _ in range(10)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_missing_shard_is_named(dataset: str, workers: int) -> None:
    for shard in open_manifest(dataset).splits.train:
        (path_of(dataset).parent / shard.path).unlink()
    with a_loader(dataset, workers=workers) as loader, pytest.raises(DataError, match="does not exist") as caught:
        loader.next(SECONDS)
    assert caught.value.where.endswith(".shard")


def test_a_model_of_another_image_shape_is_refused_with_the_right_one(dataset: str) -> None:
    with pytest.raises(ConfigError, match="4 x 4 x 1 in the dataset, 8 x 8 x 1 in the model") as caught:
        a_loader(dataset, model=ModelConfig())
    assert "image_size: 4" in caught.value.hint


def test_a_batch_that_does_not_divide_by_the_ranks_is_refused(dataset: str) -> None:
    with pytest.raises(ConfigError, match="16 does not divide by 3") as caught:
        a_loader(dataset, world_size=3)
    assert "18" in caught.value.hint


def test_the_test_split_can_be_read_in_the_same_way(dataset: str) -> None:
    ids = [number for batch in batches(dataset, 5, split="test", batch=8) for number in batch.ids]
    assert Counter(ids) == Counter(range(150, 190))


TEXT_MODEL = LanguageModelConfig(kind="lm", context=15)


@pytest.fixture
def text_dataset(tmp_path: Path) -> str:
    """Forty samples of sixteen bytes."""
    packed = pack(
        Content("text", "made up", "counting", Shape(1, 16, 1), ["text"]),
        samples=Samples(train=[Sample(one, 0, "", bytes(range(one, one + 16))) for one in range(40)], test=[]),
        shard_samples=40,
    )
    uri = (tmp_path / "manifest.json").as_uri()
    store.write(uri, packed=packed)
    return uri


@pytest.mark.parametrize("workers", [0, 1])
def test_text_comes_as_it_lies_in_the_dataset_and_brings_no_noise(text_dataset: str, workers: int) -> None:
    (whole,) = batches(text_dataset, 1, model=TEXT_MODEL, workers=workers)
    assert whole.text.dtype == np.uint8
    assert [row.tolist() for row in whole.text] == [list(range(one, one + 16)) for one in whole.ids]
    assert (whole.images.size, whole.noise.size) == (0, 0)
    ranks = [batches(text_dataset, 1, model=TEXT_MODEL, rank=rank, world_size=2)[0] for rank in range(2)]
    assert_same([joined(ranks)], [whole])


def test_another_length_of_text_is_refused_with_the_right_one(text_dataset: str) -> None:
    with pytest.raises(ConfigError, match="1 x 16 x 1 in the dataset, 1 x 65 x 1 in the model") as caught:
        a_loader(text_dataset, model=LanguageModelConfig(kind="lm"))
    assert "train.model.context: 15" in caught.value.hint
