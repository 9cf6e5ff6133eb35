"""Which shards a loader's node copies, and that batches are the same whatever is copied."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
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
from tests.builders.object_store import ObjectServer, Wire, environment_for, environment_of, serve_objects
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from tests.unit.training.data.conftest import SHAPE, make_dataset
from training.data import fill
from training.data.contents import SourceFiles
from training.data.fill import Filler
from training.data.loader import Loader, LocalBatch
from training.data.mixture import Mixture, Segment
from training.data.plan import Plan, Source
from training.data.work import Delivery, Order, plan_work

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


def test_counts_are_those_since_the_loader_was_made(server: ObjectServer, tmp_path: Path) -> None:
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(60)]
    here = make_tar_dataset(tmp_path / "here", train=some, per_shard=60)
    uri, cache = send(here, server.open()), Cache(tmp_path / "cache")
    cache.count(fetched=100, fetched_bytes=10_000)
    size = sum(one.bytes for one in open_manifest(here).splits.train) + 60 * 28
    with a_loader(uri, cache.root) as loader:
        loader.next(SECONDS)
        counts = loader.cache_counts()
        assert (counts["fetched"], counts["fetched_bytes"]) == (2, size), "the index and the shard"
    with a_loader(uri, cache.root) as loader:
        loader.next(SECONDS)
        assert loader.cache_counts()["fetched"] == 0
        cache.count(damaged=1)
        assert loader.cache_counts()["damaged"] == 1
        shutil.rmtree(cache.root)
        assert not any(loader.cache_counts().values()), "a cache that was made anew counts anew"
    with a_loader(here, cache.root) as loader:
        assert loader.cache_counts() == {}


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
    monkeypatch.setattr(shard_files, "WHOLE_BYTES", 0)
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(60)]
    here = make_tar_dataset(tmp_path / "here", train=some, per_shard=10)
    with serve_objects(tmp_path) as own, environment_of(own):
        uri = send(here, own.open())
        # Nothing listens where the store was, which is said at once: only repeating it would take long.
        monkeypatch.setattr("storage.client.Limits.__init__.__kwdefaults__", {
            "connect_seconds": 20.0, "request_seconds": 20.0, "retry_seconds": 0.2,
        })  # fmt: skip
        with a_loader(uri, tmp_path / "cache") as loader:
            own.stop()
            with pytest.raises(UnreachableError):
                loader.next(SECONDS)
            assert loader.quarantined() == []
            own.start()
            assert loader.next(SECONDS).position == 0


def test_what_a_store_did_not_answer_is_asked_for_once_more(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new attempt of the whole learner costs more than one more request."""
    here = large(tmp_path / "here")
    uri, wire = send(here, server.open()), Wire(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", environment_for(wire.port)["AWS_ENDPOINT_URL"])
    monkeypatch.setattr(fill, "WHOLE_SHARE", 2.0)
    wire.fail_reads = 1
    with (
        closing(wire),
        a_loader(here, tmp_path / "cache") as other,
        a_loader(uri, tmp_path / "cache", workers=1, prefetch=1) as loader,
    ):
        assert content(loader.next(SECONDS)) == content(other.next(SECONDS))
        wire.fail_reads = 10_000
        with pytest.raises(UnreachableError, match="400 Bad Request"):
            deque(iter(lambda: loader.next(SECONDS), None), maxlen=0)  # what was ready before is delivered
        assert loader.quarantined() == []


def test_copying_goes_on_when_access_is_given_again(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Credentials that had run out ended the thread that copies, and all was read by range from then on."""
    monkeypatch.setattr(fill, "AGAIN_SECONDS", 0.05)
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(60)]
    here = make_tar_dataset(tmp_path / "here", train=some, per_shard=10)
    uri, cache = send(here, server.open()), Cache(tmp_path / "cache")
    order = Order([uri], seed=1, learner="east", batch=12)
    delivery = Delivery(ModelConfig(image_size=16, channels=3))
    planned = plan_work(order, delivery=delivery, world_size=1, cache=cache.root)
    one = Filler(planned.work.sources, refs=planned.plan.refs, position=0, share=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        one.advance(0)
        wait_for(lambda: "access is refused" in caplog.text)
    wait_for(lambda: cache.counts.fetched == 7)  # with the index
    one.close()


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
