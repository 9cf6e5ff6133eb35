"""Which shards a loader's node copies, and that batches are the same whatever is copied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.errors import UnreachableError
from spec.shards import open_manifest, path_of
from spec.train import ModelConfig
from storage import Bucket, shard_files
from storage.cache import Cache
from storage.shard_files import Origin, ShardFile
from tests.builders.object_store import ObjectServer, environment_of, serve_objects
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from tests.unit.training.data.conftest import SHAPE, make_dataset
from training.data import fill
from training.data.contents import SourceFiles
from training.data.fill import Filler
from training.data.loader import Loader, LocalBatch
from training.data.mixture import Mixture, Segment
from training.data.plan import Plan, Source

SECONDS = 60.0
SHARDS, PER_SHARD = 20, 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """An object store that other processes find by their environment."""
    with serve_objects(tmp_path_factory.mktemp("store")) as one, environment_of(one):
        yield one


def filler(*, share: float, position: int = 0, first_row: int = 0) -> Filler:
    """Of a dataset of 2,000 samples in 20 shards that nobody has to reach."""
    shards = [
        ShardFile(f"{number}", PER_SHARD, 1000, f"{number:064d}", key=f"{number}.tar") for number in range(SHARDS)
    ]
    samples = SHARDS * PER_SHARD - first_row
    files = SourceFiles(
        where="", digest="d", order="d", samples=samples, shards=tuple(shards), shape=SHAPE, first_row=first_row,
        origin=Origin("s3://bucket/none", "/nowhere", "d"),
    )  # fmt: skip
    plan = Plan([Source("d", samples)], mixture=Mixture([Segment(0, (1,))]), seed=1, learner="east", batches=[50])
    return Filler([files], refs=plan.refs, position=position, share=share)


def worth(one: Filler) -> list[int]:
    one.look_ahead()
    return sorted(int(shard.path) for _, shard in one.worth_copying())


# --- what is worth a copy


def test_what_is_read_whole_within_the_horizon_is_copied_at_once() -> None:
    assert worth(filler(share=1.0)) == list(range(SHARDS))


def test_what_many_nodes_go_through_is_copied_when_enough_of_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "HORIZON", 2000)
    monkeypatch.setattr(fill, "_STEP", 500)
    one = filler(share=0.05)
    assert worth(one) == [], "a twentieth of each shard so far"
    one._position = 3 * 2000
    assert worth(one) == [], "four epochs are looked at"
    one._position = 4 * 2000
    assert worth(one) == list(range(SHARDS)), "five times a twentieth is a quarter"


def test_shards_of_the_other_split_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "HORIZON", 2000)
    monkeypatch.setattr(fill, "_STEP", 500)
    assert worth(filler(share=1.0, first_row=17 * PER_SHARD)) == [17, 18, 19]


# --- with a loader


def send(uri: str, bucket: Bucket) -> str:
    for path in path_of(uri).parent.iterdir():
        bucket.send(path.name, path)
    return f"{bucket.uri}/manifest.json"


def large(folder: Path) -> str:
    """Two shards of seventeen MiB: too large to be copied at the first touch."""
    rng = np.random.default_rng(5)
    some = [Picture(encoded(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8)), 300, 300) for _ in range(132)]
    return make_tar_dataset(folder, train=some, per_shard=66)


def a_loader(uri: str, cache: Path, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {
        "seed": 1, "learner": "east", "start_position": 0, "batch": 12, "rank": 0, "world_size": 1, "workers": 0,
        "prefetch": 2, "model": ModelConfig(image_size=16, channels=3), "cache": cache,
    }  # fmt: skip
    return Loader(uri, **(arguments | changes))


def content(batch: LocalBatch) -> tuple[Any, ...]:
    return batch.position, batch.ids, batch.captions, batch.images.tobytes()


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < until
        threading.Event().wait(0.02)


def test_workers_read_by_range_until_the_shards_are_copied(server: ObjectServer, tmp_path: Path) -> None:
    here = large(tmp_path / "here")
    uri, cache = send(here, server.open()), Cache(tmp_path / "cache")
    shards = open_manifest(here).splits.train
    with a_loader(uri, cache.root, workers=2) as loader, a_loader(here, cache.root) as other:
        first = [content(loader.next(SECONDS)) for _ in range(2)]
        assert cache.counts.range_reads >= 12, "nothing waits for a copy"
        wait_for(lambda: all(cache.path(one.sha256).exists() for one in shards))
        later = [content(loader.next(SECONDS)) for _ in range(20)]
        before = cache.counts.range_reads
        later += [content(loader.next(SECONDS)) for _ in range(10)]
        assert cache.counts.range_reads == before
        assert first + later == [content(other.next(SECONDS)) for _ in range(32)]
    assert cache.counts.fetched == 3, "two shards and the index, once each"
    assert not [one for one in threading.enumerate() if one.name == "loader-fill"]


def test_what_does_not_fit_is_read_by_range_all_the_time(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "WHOLE_BYTES", 0)
    monkeypatch.setattr(fill, "AGAIN_SECONDS", 0.05)
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(60)]
    here = make_tar_dataset(tmp_path / "here", train=some, per_shard=10)
    sizes = sorted(one.bytes for one in open_manifest(here).splits.train)
    limit = int((sum(sizes[-4:]) + 60 * 28) / 0.9) + 2
    uri, cache = send(here, server.open()), Cache(tmp_path / "cache", limit_bytes=limit)
    with a_loader(uri, cache.root) as loader, a_loader(here, cache.root) as other:
        assert content(loader.next(SECONDS)) == content(other.next(SECONDS))
        wait_for(lambda: cache.counts.fetched >= 5)
        for _ in range(15):
            assert content(loader.next(SECONDS)) == content(other.next(SECONDS))
        assert sum(one.bytes for one in cache.copies()) <= limit
        assert (cache.counts.fetched, cache.counts.evicted) == (5, 0), "four shards of six, and the index"
        before = cache.counts.range_reads
        for _ in range(5):
            loader.next(SECONDS)
        assert before + 10 <= cache.counts.range_reads <= before + 40, "a third of an epoch or so"


def test_shards_of_raw_samples_are_read_by_range_too(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "WHOLE_BYTES", 0)
    (tmp_path / "here").mkdir()
    here = make_dataset(tmp_path / "here")
    uri, cache = send(here, server.open()), Cache(tmp_path / "cache")
    options = {"model": ModelConfig(image_size=4, channels=1, patch_size=2)}
    with a_loader(uri, cache.root, **options) as loader, a_loader(here, cache.root, **options) as other:
        assert content(loader.next(SECONDS)) == content(other.next(SECONDS))
        assert cache.counts.range_reads == 12 + 2 * 2, "each sample, and header and index of the two shards they lie in"
        wait_for(lambda: cache.counts.fetched == 3)
        assert content(loader.next(SECONDS)) == content(other.next(SECONDS))


def test_a_damaged_copy_of_raw_samples_is_fetched_again(server: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    here = make_dataset(tmp_path / "here")
    uri, cache = send(here, server.open()), Cache(tmp_path / "cache")
    options = {"model": ModelConfig(image_size=4, channels=1, patch_size=2)}
    with a_loader(uri, cache.root, **options) as loader:
        want = [content(loader.next(SECONDS)) for _ in range(10)]
    for one in open_manifest(here).splits.train:
        with cache.path(one.sha256).open("r+b") as file:
            file.seek(one.bytes - 3)
            file.write(b"bad")
    with a_loader(uri, cache.root, **options) as loader:
        assert [content(loader.next(SECONDS)) for _ in range(10)] == want
    assert cache.counts.damaged == 3


def test_a_store_that_is_away_is_an_error_that_may_pass_and_no_reason_for_replacements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.client.Limits.__init__.__kwdefaults__", {
        "connect_seconds": 0.2, "request_seconds": 1.0, "retry_seconds": 0.2,
    })  # fmt: skip
    monkeypatch.setattr(shard_files, "WHOLE_BYTES", 0)
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(60)]
    here = make_tar_dataset(tmp_path / "here", train=some, per_shard=10)
    with serve_objects(tmp_path) as own, environment_of(own):
        uri = send(here, own.open())
        with a_loader(uri, tmp_path / "cache") as loader:
            own.stop()
            with pytest.raises(UnreachableError):
                loader.next(SECONDS)
            assert loader.quarantined() == []
            own.start()
            assert loader.next(SECONDS).position == 0


def test_workers_find_a_bucket_that_the_rank_learned_of_after_the_first_worker(
    server: ObjectServer, tmp_path: Path
) -> None:
    here = large(tmp_path / "here")
    with a_loader(send(here, server.open()), tmp_path / "cache", workers=1) as loader:
        loader.next(SECONDS)
    with serve_objects(tmp_path / "other") as other, environment_of(other):
        uri = send(here, other.open())
        with a_loader(uri, tmp_path / "cache-2", workers=1) as loader:
            loader.next(SECONDS)
