"""Shards in place, as copies and by range: the same bytes, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spec.errors import DataError
from spec.shards import Manifest, open_manifest, path_of
from storage import Bucket, shard_files
from storage.cache import Cache
from storage.datasets import local_manifest, origin_of
from storage.index import open_index
from storage.shard_files import OPEN_SHARDS, ShardFile, ShardFiles, in_place
from storage.tar_shards import DamagedError, TarShards
from tests.builders.object_store import ObjectServer, environment_of
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset

PICTURES, PER_SHARD = 24, 8


class Dataset:
    """A dataset of encoded images in a folder and in a bucket, and the cache of a node."""

    def __init__(self, here: str, bucket: Bucket, root: Path) -> None:
        self.here, self.bucket, self.cache = here, bucket, Cache(root)
        self.uri = f"{bucket.uri}/manifest.json"
        self.manifest: Manifest = open_manifest(here)

    @property
    def rows(self) -> NDArray[np.void]:
        return open_index(path_of(self.here).parent / "index.bin", samples=PICTURES)

    def copied(self) -> list[bool]:
        return [self.cache.path(one.sha256).exists() for one in self.manifest.splits.train]

    def open(self) -> TarShards:
        """As a loader on another machine does."""
        local = local_manifest(self.uri, cache=self.cache.root, splits=())
        folder = path_of(local).parent
        shards = [
            ShardFile(str(folder / one.path), one.samples, one.bytes, one.sha256, key=one.path)
            for one in self.manifest.splits.train
        ]
        return TarShards(ShardFiles(shards, origin=origin_of(self.uri, local=local)))

    def read(self) -> list[bytes]:
        with closing(self.open()) as shards:
            return [shards.read(row)[0] for row in self.rows]


@pytest.fixture
def dataset(server: ObjectServer, tmp_path: Path) -> Iterator[Dataset]:
    """Three shards of eight pictures."""
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(PICTURES)]
    here = make_tar_dataset(tmp_path / "pictures", train=some, per_shard=PER_SHARD)
    bucket = server.open()
    for path in path_of(here).parent.iterdir():
        bucket.send(path.name, path)
    with environment_of(server):
        yield Dataset(here, bucket, tmp_path / "cache")


@pytest.fixture
def want(dataset: Dataset) -> list[bytes]:
    """The images, read in place."""
    folder = path_of(dataset.here).parent
    with closing(TarShards(in_place(folder / one.path for one in dataset.manifest.splits.train))) as shards:
        return [shards.read(row)[0] for row in dataset.rows]


def test_small_shards_are_copied_when_they_are_read(dataset: Dataset, want: list[bytes]) -> None:
    with closing(dataset.open()) as shards:
        assert dataset.copied() == [False] * 3
        assert shards.read(dataset.rows[PER_SHARD])[0] == want[PER_SHARD]
        assert dataset.copied() == [False, True, False]
    assert dataset.read() == want
    counts = dataset.cache.counts
    assert (counts.fetched, counts.range_reads) == (4, 0), "three shards and the index"


def test_large_shards_are_read_by_range_until_there_is_a_copy(
    dataset: Dataset, want: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "WHOLE_BYTES", 0)
    assert dataset.read() == want
    assert dataset.copied() == [False] * 3
    assert dataset.cache.counts.range_reads == PICTURES
    assert dataset.cache.counts.range_bytes < sum(one.bytes for one in dataset.manifest.splits.train)
    local_manifest(dataset.uri, cache=dataset.cache.root)
    assert dataset.read() == want
    assert dataset.cache.counts.range_reads == PICTURES


def test_what_is_expected_comes_together_and_is_taken_once(
    dataset: Dataset, want: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "WHOLE_BYTES", 0)
    with closing(dataset.open()) as shards:
        shards.expect(dataset.rows[:10])
        assert [shards.read(row)[0] for row in dataset.rows[:10]] == want[:10]
        assert dataset.cache.counts.range_reads == 10
        shards.expect(dataset.rows[10:12])
        shards.expect(dataset.rows[12:14])
        assert [shards.read(row)[0] for row in dataset.rows[12:14]] == want[12:14]


def test_where_there_is_no_room_shards_are_read_by_range(dataset: Dataset, want: list[bytes]) -> None:
    one, two, _ = dataset.manifest.splits.train
    assert dataset.manifest.index is not None
    limit = int((one.bytes + two.bytes + dataset.manifest.index.bytes) / 0.9) + 2
    cache = Cache(dataset.cache.root, limit_bytes=limit)
    assert dataset.read() == want
    assert dataset.copied() == [True, True, False]
    assert cache.counts.range_reads == PER_SHARD
    assert cache.counts.evicted == 0, "a shard of the same dataset will be read again as surely"
    assert cache.counts.misses == 4, "index and shards: whether there is room is not looked at for each sample"


def test_what_did_not_fit_is_copied_when_there_is_room(
    dataset: Dataset, want: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(dataset.cache.root, limit_bytes=PICTURES * 28)
    with closing(dataset.open()) as shards:
        assert [shards.read(row)[0] for row in dataset.rows] == want
        assert dataset.copied() == [False] * 3
        cache = Cache(cache.root, limit_bytes=2**30)
        shards.read(dataset.rows[0])
        assert dataset.copied() == [False] * 3
    monkeypatch.setattr(shard_files, "AGAIN_SECONDS", 0.0)
    Cache(cache.root, limit_bytes=PICTURES * 28)
    with closing(dataset.open()) as shards:
        shards.read(dataset.rows[0])
        Cache(cache.root, limit_bytes=2**30)
        assert shards.read(dataset.rows[0])[0] == want[0]
        assert dataset.copied() == [True, False, False]


def test_a_damaged_copy_is_fetched_again(dataset: Dataset, want: list[bytes]) -> None:
    assert dataset.read() == want
    copy = dataset.cache.path(dataset.manifest.splits.train[1].sha256)
    with copy.open("r+b") as file:
        file.seek(int(dataset.rows[PER_SHARD + 2]["offset"]) + 40)
        file.write(b"\0damaged")
    assert dataset.read() == want
    assert (dataset.cache.counts.damaged, dataset.cache.counts.fetched) == (1, 5)


def test_damage_at_the_source_stays_damage(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "WHOLE_BYTES", 0)
    key = dataset.manifest.splits.train[0].path
    data = bytearray(dataset.bucket.read(key))
    at = int(dataset.rows[3]["offset"]) + 40
    data[at : at + 8] = b"\0damaged"
    dataset.bucket.write(key, [bytes(data)])
    with closing(dataset.open()) as shards:
        shards.read(dataset.rows[2])
        with pytest.raises(DamagedError):
            shards.read(dataset.rows[3])
    for size in (at + 4, at - 400):  # it ends inside the sample, or before
        dataset.bucket.write(key, [bytes(data[:size])])
        with closing(dataset.open()) as shards, pytest.raises(DataError, match="a shard of the dataset is damaged"):
            shards.read(dataset.rows[3])
    dataset.bucket.delete([key])
    with closing(dataset.open()) as shards, pytest.raises(DataError, match="a shard of the dataset does not exist"):
        shards.read(dataset.rows[3])


def test_a_dataset_on_this_machine_is_read_in_place(dataset: Dataset) -> None:
    assert origin_of(dataset.here, local=local_manifest(dataset.here, cache=dataset.cache.root)) is None
    assert dataset.cache.copies() == []


def test_open_shards_are_bounded_and_closed_in_the_end(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" for number in range(OPEN_SHARDS + 9)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = in_place(paths)
    for number in (*range(len(paths)), *range(len(paths))):
        assert files.read(number, offset=2, size=3) == bytes([number]) * 3
    assert len(list(Path("/proc/self/fd").iterdir())) - before == OPEN_SHARDS
    files.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
