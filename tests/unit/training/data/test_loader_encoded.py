"""Loaders of encoded images: sizes, mixtures, crops, and what becomes of samples that cannot be used."""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from spec.buckets import Bucket
from spec.errors import ConfigError, DataError
from spec.shards import open_manifest, path_of
from spec.train import LanguageModelConfig, ModelConfig
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.data.batch import to_unit
from training.data.loader import Loader, LocalBatch
from training.data.mixture import Segment
from training.data.quarantine import Limits

SECONDS = 30.0
MODEL = ModelConfig(image_size=16, channels=3)
BUCKETS = [Bucket(16, 16, 8), Bucket(12, 24, 6), Bucket(24, 12, 4)]
SIZES = [(20, 20), (16, 32), (36, 18), (22, 18)]


def pictures(count: int, *, first: int = 0) -> list[Picture]:
    """Of different sizes and forms."""
    found: list[Picture] = []
    for number in range(first, first + count):
        width, height = SIZES[number % len(SIZES)]
        form, ending = (("PNG", "png"), ("JPEG", "jpg"), ("WEBP", "webp"))[number % 3]
        found.append(Picture(encoded(picture(number, width=width, height=height), form), width, height, ending))
    return found


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """Sixty training pictures in three shards, ten others."""
    return make_tar_dataset(tmp_path / "pictures", train=pictures(60), test=pictures(10, first=60))


def batches(dataset: str | list[str], count: int, **changes: Any) -> list[LocalBatch]:
    with a_loader(dataset, **changes) as loader:
        return [loader.next(SECONDS) for _ in range(count)]


def a_loader(dataset: str | list[str], **changes: Any) -> Loader:
    arguments: dict[str, Any] = {
        "seed": 3, "learner": "east", "start_position": 0, "batch": 12, "rank": 0, "world_size": 1, "workers": 0,
        "prefetch": 4, "model": MODEL,
        "cache": path_of(dataset if isinstance(dataset, str) else dataset[0]).parents[1] / "cache",
    }  # fmt: skip
    return Loader(dataset, **(arguments | changes))


def content(some: list[LocalBatch]) -> list[tuple[Any, ...]]:
    return [(one.position, one.ids, one.captions, one.images.tobytes(), one.noise.tobytes()) for one in some]


def images_of(some: list[LocalBatch]) -> dict[int, NDArray[np.float32]]:
    """By sample."""
    return {number: image for batch in some for number, image in zip(batch.ids, batch.images, strict=True)}


def test_images_of_any_size_come_in_the_models_size(dataset: str) -> None:
    (batch,) = batches(dataset, 1, crop=False)
    assert batch.images.shape == (12, 3, 16, 16)
    assert batch.captions == [f"picture {number}" for number in batch.ids]
    assert batch.labels.tolist() == [number % 7 for number in batch.ids]
    row = next(row for row, number in enumerate(batch.ids) if number % 4 == 0 and number % 3 == 0)  # square, PNG
    want = Image.fromarray(picture(batch.ids[row], width=20, height=20)).resize((16, 16), Image.Resampling.LANCZOS)
    assert np.abs(batch.images[row] - to_unit(np.asarray(want).transpose(2, 0, 1))).max() < 0.05


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_deliver_what_the_rank_itself_would_have_prepared(dataset: str, workers: int) -> None:
    assert content(batches(dataset, 12, workers=workers)) == content(batches(dataset, 12))


def test_every_epoch_gives_every_sample_once_cropped_in_another_place(dataset: str) -> None:
    some = batches(dataset, 10)
    ids = [number for batch in some for number in batch.ids]
    assert sorted(ids[:60]) == sorted(ids[60:]) == list(range(60))
    seen, again = images_of(some[:5]), images_of(some[5:])
    wide = [number for number in range(60) if number % 4 in (1, 2)]
    assert sum(seen[one].tobytes() != again[one].tobytes() for one in wide) > 25


def test_the_crop_of_a_sample_does_not_depend_on_its_neighbours(dataset: str) -> None:
    """Report 12 (pytorch#41329): it depends on seed, source, epoch and sample alone."""
    whole = images_of(batches(dataset, 5))
    other = images_of(batches(dataset, 12, batch=5, workers=2))
    assert all(other[number].tobytes() == image.tobytes() for number, image in whole.items())
    seeded = images_of(batches(dataset, 5, seed=4))
    assert sum(seeded[number].tobytes() != image.tobytes() for number, image in whole.items()) > 25


def test_half_of_the_images_are_mirrored_where_that_is_wanted(dataset: str) -> None:
    plain = images_of(batches(dataset, 5, crop=False))
    some = batches(dataset, 5, crop=False, flip=True)
    mirrored = 0
    for number, image in images_of(some).items():
        if image.tobytes() != plain[number].tobytes():
            assert np.array_equal(image[:, :, ::-1], plain[number])
            mirrored += 1
    assert 18 <= mirrored <= 42


def test_plain_pixels_come_without_noise_and_with_the_same_times(dataset: str) -> None:
    (plain,), (usual,) = batches(dataset, 1, is_plain=True, workers=1), batches(dataset, 1)
    assert (plain.images.dtype, plain.images.shape, plain.noise.size) == (np.uint8, (12, 16, 16, 3), 0)
    assert np.array_equal(to_unit(plain.images.view(np.uint8).transpose(0, 3, 1, 2)), usual.images)
    assert np.array_equal(plain.time, usual.time)


def bucket_of(batch: LocalBatch) -> Bucket:
    return next(one for one in BUCKETS if (one.height, one.width) == batch.images.shape[2:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_one_size_that_fits_its_images(dataset: str, workers: int) -> None:
    some = batches(dataset, 30, buckets=BUCKETS, workers=workers)
    assert {bucket_of(batch) for batch in some} == set(BUCKETS)
    for batch in some:
        own = bucket_of(batch)
        assert len(batch.ids) == own.batch
        assert {BUCKETS[(0, 1, 2, 0)[number % 4]] for number in batch.ids} == {own}
    positions = np.cumsum([0, *(len(batch.ids) for batch in some)])
    assert [batch.position for batch in some] == positions[:-1].tolist()


def test_ranks_share_every_batch_of_several_sources_and_sizes(tmp_path: Path, dataset: str) -> None:
    more = make_tar_dataset(tmp_path / "more", train=pictures(30, first=100))
    mixed: dict[str, Any] = {"buckets": BUCKETS, "mixture": [Segment(0, (3, 1))]}
    whole = batches([dataset, more], 40, **mixed)
    parts = [batches([dataset, more], 40, rank=rank, world_size=2, workers=1, **mixed) for rank in range(2)]
    for batch, first, second in zip(whole, *parts, strict=True):
        assert first.ids + second.ids == batch.ids
        assert np.concatenate([first.images, second.images]).tobytes() == batch.images.tobytes()
        assert np.concatenate([first.noise, second.noise]).tobytes() == batch.noise.tobytes()
    sources = Counter(source for batch in whole for source in batch.refs.source.tolist())
    assert sources[0] / sources[1] == pytest.approx(3, rel=0.2)


def test_a_loader_of_several_sizes_goes_on_from_position_and_starts(dataset: str) -> None:
    with a_loader(dataset, buckets=BUCKETS) as loader:
        for _ in range(7):
            loader.next(SECONDS)
        position, starts, digest = loader.position, loader.starts(loader.position), loader.plan_digest
        want = [loader.next(SECONDS) for _ in range(6)]
    resumed: dict[str, Any] = {"start_position": position, "starts": starts, "buckets": BUCKETS}
    with a_loader(dataset, workers=2, **resumed) as loader:
        assert loader.plan_digest == digest
        assert content([loader.next(SECONDS) for _ in range(6)]) == content(want)


def test_a_table_of_sizes_that_a_crash_cut_off_is_made_again(dataset: str) -> None:
    want = content(batches(dataset, 6, buckets=BUCKETS))
    (table,) = (path_of(dataset).parents[1] / "cache" / "buckets").iterdir()
    os.truncate(table, 7)
    assert content(batches(dataset, 6, buckets=BUCKETS)) == want


def test_a_size_that_too_few_images_have_is_joined_with_another(tmp_path: Path) -> None:
    train = [*pictures(60), Picture(encoded(picture(60, width=40, height=10)), 40, 10)]
    uri = make_tar_dataset(tmp_path / "rare", train=train)
    some = batches(uri, 60, buckets=[*BUCKETS, Bucket(40, 10, 2)])
    assert {batch.images.shape[2:] for batch in some if 60 in batch.ids} == {(12, 24)}


def test_bucket_and_pixels_follow_the_way_an_image_is_held(tmp_path: Path) -> None:
    """Report 16 (kohya-ss#1316): images that are only rotated by EXIF."""
    pixels = picture(5, width=32, height=16)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned right
    turned = Picture(encoded(pixels, "PNG", exif=exif), 16, 32)
    uri = make_tar_dataset(tmp_path / "turned", train=[turned] * 12)
    (batch,) = batches(uri, 1, buckets=BUCKETS, crop=False)
    assert batch.images.shape[2:] == (24, 12)
    want = Image.fromarray(pixels).rotate(-90, expand=True).resize((12, 24), Image.Resampling.LANCZOS)
    assert np.abs(batch.images[0] - to_unit(np.asarray(want).transpose(2, 0, 1))).max() < 0.05


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cut_image_is_replaced_and_told_and_all_goes_on(tmp_path: Path, workers: int) -> None:
    """Report 11 (datasets#6470)."""
    train = pictures(60)
    train[9] = train[9]._replace(data=train[9].data[:200])
    uri = make_tar_dataset(tmp_path / "cut", train=train)
    with a_loader(uri, workers=workers) as loader:
        some = [loader.next(SECONDS) for _ in range(10)]
        found = loader.quarantined()
        assert loader.quarantined() == []
    assert [(one.sample, one.reason) for one in found] == [(9, "truncated")] * 2
    ids = [number for batch in some for number in batch.ids]
    assert 9 not in ids
    for one in found:
        assert ids[one.position] == one.replacement
        batch = some[one.position // 12]
        assert batch.refs.sample[one.position % 12] == one.replacement
    assert set(ids) == set(range(60)) - {9}
    ranks = [batches(uri, 10, rank=rank, world_size=2) for rank in range(2)]
    assert [number for pair in zip(*ranks, strict=True) for part in pair for number in part.ids] == ids


def test_the_rest_of_a_cut_shard_is_replaced(dataset: str) -> None:
    """Report 10 (webdataset#142): one truncated tar."""
    path = path_of(dataset).parent / open_manifest(dataset).splits.train[1].path
    os.truncate(path, path.stat().st_size // 2)
    with a_loader(dataset, workers=1, limits=Limits(share=0.5)) as loader:
        some = [loader.next(SECONDS) for _ in range(5)]
        found = loader.quarantined()
    lost = {one.sample for one in found}
    assert {one.reason for one in found} == {"checksum"}
    assert lost == set(range(min(lost), 40))
    assert 25 < min(lost) < 35
    assert not lost & {number for batch in some for number in batch.ids}


@pytest.mark.parametrize("workers", [0, 1])
def test_too_much_damage_is_an_error_that_stays(dataset: str, workers: int) -> None:
    path = path_of(dataset).parent / open_manifest(dataset).splits.train[1].path
    path.write_bytes(bytes(path.stat().st_size))
    with a_loader(dataset, workers=workers, limits=Limits(share=0.1, least=5)) as loader:
        for _ in range(2):
            with pytest.raises(DataError, match=r"more than 10.0%: \d+ checksum") as caught:
                [loader.next(SECONDS) for _ in range(10)]
            assert caught.value.where == dataset


def test_a_dataset_of_which_nothing_can_be_used_is_an_error(tmp_path: Path) -> None:
    uri = make_tar_dataset(tmp_path / "broken", train=[Picture(b"no image", 20, 20)] * 30)
    with a_loader(uri) as loader, pytest.raises(DataError, match=r"cannot be used \(format\), nor can any"):
        loader.next(SECONDS)


def test_a_missing_shard_is_an_error_and_no_reason_for_replacements(dataset: str) -> None:
    (path_of(dataset).parent / open_manifest(dataset).splits.train[1].path).unlink()
    with a_loader(dataset, workers=1) as loader, pytest.raises(DataError, match="does not exist"):
        [loader.next(SECONDS) for _ in range(5)]


def test_an_index_that_was_changed_is_refused(dataset: str) -> None:
    path = path_of(dataset).parent / "index.bin"
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="index is not the one"):
        a_loader(dataset)


def test_a_worker_that_cannot_begin_says_why(dataset: str) -> None:
    """The dataset went away, and then a worker: its successors died one after the other, without a word to the rank."""
    with a_loader(dataset, workers=1, prefetch=1) as loader:
        loader.next(SECONDS)
        (path_of(dataset).parent / "index.bin").unlink()
        os.kill(loader.pids[0], signal.SIGKILL)
        with pytest.raises(DataError, match="the dataset's index cannot be read"):
            deque(iter(lambda: loader.next(SECONDS), None), maxlen=0)  # what was ready before is delivered
        assert len(loader.pids) == 1


def test_the_test_split_can_be_read_in_the_same_way(dataset: str) -> None:
    (batch,) = batches(dataset, 1, split="test", batch=10)
    assert sorted(batch.ids) == list(range(60, 70))
    assert batch.captions == [f"picture {number}" for number in batch.ids]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (LanguageModelConfig(kind="lm"), "the model is for text"),
        (ModelConfig(image_size=16, channels=2), "images of 2 channels"),
    ],
)
def test_a_model_that_takes_no_such_images_is_refused(dataset: str, model: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        a_loader(dataset, model=model)


def test_ranks_that_share_no_batch_evenly_get_all_of_it_together(dataset: str) -> None:
    """I4: one size and one whole batch on all ranks, whose parts differ by a sample at most."""
    whole = batches(dataset, 12, buckets=BUCKETS)
    parts = [batches(dataset, 12, buckets=BUCKETS, world_size=3, rank=rank, workers=2) for rank in range(3)]
    for batch, *own in zip(whole, *parts, strict=True):
        assert {(one.position, one.whole, one.mark, one.images.shape[1:]) for one in own} == {
            (batch.position, len(batch.ids), batch.mark, batch.images.shape[1:])
        }
        assert max(len(one.ids) for one in own) - min(len(one.ids) for one in own) <= 1
        assert [number for one in own for number in one.ids] == batch.ids
        assert np.concatenate([one.noise for one in own]).tobytes() == batch.noise.tobytes()
    with pytest.raises(ConfigError, match="batch of 4 cannot be shared by 5 ranks"):
        a_loader(dataset, buckets=BUCKETS, world_size=5)


def test_steps_are_counted_wherever_a_loader_begins(dataset: str) -> None:
    with a_loader(dataset, buckets=BUCKETS) as loader:
        seen = [(loader.step, loader.next(SECONDS).position) for _ in range(60)]
        starts = loader.starts(loader.position)
    assert [step for step, _ in seen] == list(range(60))
    assert len(starts) > 2, "windows are about an epoch"
    for step, position in seen[::7]:
        for known in ([], starts):
            with a_loader(dataset, buckets=BUCKETS, start_position=position, starts=known) as loader:
                assert loader.step == step
