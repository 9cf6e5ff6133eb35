"""A dataset in a bucket becomes files of this machine: verified, fetched once, and only what is asked for."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec.errors import DataError, UnreachableError
from spec.shards import Split, open_manifest, path_of, read_samples
from storage import Bucket
from storage import cache as node_cache
from storage.datasets import cached_datasets, default_cache, held_shards, local_manifest, read_manifest
from tests.builders.object_store import ObjectServer, environment_of
from tests.unit.training.data.conftest import TEST, make_dataset


@pytest.fixture
def here(tmp_path: Path) -> str:
    """A dataset in a folder."""
    (tmp_path / "here").mkdir()
    return make_dataset(tmp_path / "here")


@pytest.fixture
def place(server: ObjectServer, here: str) -> Iterator[Bucket]:
    """The same dataset in a bucket."""
    bucket = server.open()
    for path in path_of(here).parent.iterdir():
        bucket.send(path.name, path)
    with environment_of(server):
        yield bucket


def uri_of(place: Bucket) -> str:
    return f"{place.uri}/manifest.json"


def shards(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("datasets/*/*.shard") if path.exists())


def test_a_dataset_in_a_folder_stays_where_it_is(here: str, tmp_path: Path) -> None:
    assert local_manifest(here, cache=tmp_path / "cache") == here
    with held_shards(here, shards=open_manifest(here).splits.train, local=here):
        assert not (tmp_path / "cache").exists()
    assert read_manifest(here) == open_manifest(here)


def test_a_copy_reads_like_the_original(here: str, place: Bucket, tmp_path: Path) -> None:
    local = local_manifest(uri_of(place), cache=tmp_path / "cache")
    assert open_manifest(local) == open_manifest(here) == read_manifest(uri_of(place))
    assert list(read_samples(local, split="train")) == list(read_samples(here, split="train"))
    assert list(read_samples(local, split="test")) == list(read_samples(here, split="test"))


def test_only_the_splits_that_are_asked_for_are_fetched(place: Bucket, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = local_manifest(uri_of(place), cache=cache, splits=())
    assert shards(cache) == []
    assert local_manifest(uri_of(place), cache=cache, splits=("test",)) == first
    assert shards(cache) == ["test-0.shard"]
    with held_shards(uri_of(place), shards=open_manifest(first).splits.train[1:2], local=first):
        assert shards(cache) == ["test-0.shard", "train-1.shard"]


def test_what_is_here_is_not_fetched_again(place: Bucket, tmp_path: Path) -> None:
    first = local_manifest(uri_of(place), cache=tmp_path)
    place.delete([entry.key for entry in place.list() if entry.key.endswith(".shard")])
    assert local_manifest(uri_of(place), cache=tmp_path) == first


def _read(uri: str, cache: str, split: Split) -> None:
    """Exit with the number of samples."""
    os._exit(len(list(read_samples(local_manifest(uri, cache=Path(cache)), split=split))))


def test_a_copy_that_was_damaged_is_fetched_again_by_the_next_process(here: str, place: Bucket, tmp_path: Path) -> None:
    """The remedy was said to be preparing the dataset again, and nothing but removing the cache helped."""
    spawn = multiprocessing.get_context("spawn")

    def read(split: Split) -> int | None:
        process = spawn.Process(target=_read, args=(uri_of(place), str(tmp_path / "cache"), split))
        process.start()
        process.join(60)
        return process.exitcode

    assert read("test") == TEST
    manifest, cache = open_manifest(here), node_cache.Cache(tmp_path / "cache")
    with cache.path(manifest.splits.test[0].sha256).open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"bad")
    (copy,) = cache.root.glob("datasets/*/manifest.json")
    assert [one.copies for one in cached_datasets(cache)] == [4]
    copy.write_bytes(b"")
    assert cached_datasets(cache) == []
    assert read("test") == TEST
    assert [one.copies for one in cached_datasets(cache)] == [4]
    assert cache.counts.damaged == 1


def _fetch(uri: str, cache: str) -> None:
    local_manifest(uri, cache=Path(cache))


def test_processes_that_start_together_share_one_copy(place: Bucket, tmp_path: Path, here: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_fetch, args=(uri_of(place), str(tmp_path / "cache"))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    local = local_manifest(uri_of(place), cache=tmp_path / "cache")
    assert list(read_samples(local, split="train")) == list(read_samples(here, split="train"))
    assert not list((tmp_path / "cache").glob("partial/*"))


def test_damaged_and_missing_objects_are_named_and_never_appear(place: Bucket, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    place.put("train-1.shard", b"damaged")
    with pytest.raises(DataError, match="damaged") as caught:
        local_manifest(uri_of(place), cache=cache)
    assert caught.value.where == f"{place.uri}/train-1.shard"
    assert "train-1.shard" not in shards(cache)
    place.delete(["train-1.shard"])
    with pytest.raises(DataError, match="a shard of the dataset does not exist"):
        local_manifest(uri_of(place), cache=cache)
    place.put("manifest.json", place.get("manifest.json").data.replace(b"tiny", b"tidy"))
    with pytest.raises(DataError, match="it was changed"):
        local_manifest(uri_of(place), cache=cache)
    place.delete(["manifest.json"])
    for call in (lambda: local_manifest(uri_of(place), cache=cache), lambda: read_manifest(uri_of(place))):
        with pytest.raises(DataError, match="the dataset's manifest does not exist") as missing:
            call()
        assert type(missing.value) is DataError, "the driver tells by the type's name what a person has to mend"


def test_waiting_for_another_fetcher_has_a_deadline(
    place: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = open_manifest(local_manifest(uri_of(place), cache=tmp_path, splits=())).splits.train[0]
    monkeypatch.setattr(node_cache, "FETCH_SECONDS", 0.1)
    node_cache.Cache(tmp_path)
    with (tmp_path / "partial" / f"{shard.sha256}.other").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UnreachableError, match="another process has been fetching"):
            local_manifest(uri_of(place), cache=tmp_path)


def test_all_processes_of_a_pod_share_the_folder_of_the_run_and_all_runs_of_a_laptop_one(tmp_path: Path) -> None:
    pod = {"GKR_RUN_DIR": str(tmp_path), "GKR_ROLE": "trainer"}
    assert default_cache(pod) == tmp_path / "data"
    assert default_cache({**pod, "GKR_DATA_CACHE": "/large"}) == Path("/large")
    assert default_cache({"GKR_RUN_DIR": str(tmp_path), "XDG_CACHE_HOME": "/c"}) == Path("/c/gkr/data")
