"""The node's copies: one fetch each, within the limit, whatever happens to the processes that share them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest

from spec.errors import DataError, UnreachableError
from storage import Bucket, cache, open_bucket
from storage.cache import Cache, StoppedError, Wanted
from storage.errors import NoRoomError
from storage.protocol import PIECE_BYTES
from tests.builders.object_store import ObjectServer, Wire, environment_for, environment_of

SIZE = 50_000
SPAWN = multiprocessing.get_context("spawn")
DEADLINE = 60.0


def put(bucket: Bucket, key: str, *, size: int = SIZE) -> Wanted:
    """A new object."""
    data = random.Random(key).randbytes(size)
    bucket.write(key, [data])
    return Wanted(key, size, hashlib.sha256(data).hexdigest())


def bring(here: Cache, one: Wanted, bucket: Bucket) -> None:
    """Use a copy, and let it go."""
    os.close(here.hold(one, bucket=bucket))


def is_here(here: Cache, one: Wanted) -> bool:
    return here.path(one.sha256).exists()


@pytest.fixture(autouse=True)
def _reachable(server: ObjectServer) -> Iterator[None]:
    """Other processes find the object store by their environment."""
    with environment_of(server):
        yield


# --- other processes


def hold_until_told(root: str, one: Wanted, uri: str, pipe: Connection) -> None:
    """Hold a copy until the pipe says something."""
    with closing(os.fdopen(Cache(Path(root)).hold(one, bucket=open_bucket(uri)), "rb")):
        pipe.send("held")
        pipe.poll(DEADLINE)


def stop_in_the_middle(root: str, one: Wanted, uri: str, pipe: Connection) -> None:
    """Begin to fetch, tell when the first piece came, and go on when told; tell what came of it."""
    waits = iter([True])

    def middle() -> bool:
        if next(waits, False):
            pipe.send("middle")
            pipe.poll(DEADLINE)
        return False

    pipe.send(Cache(Path(root)).fetch(one, bucket=open_bucket(uri), stop=middle) is not None)


def use_many(root: str, wanted: list[Wanted], uri: str, seed: int) -> None:
    """Use copies in an order of one's own."""
    here, bucket, chance = Cache(Path(root)), open_bucket(uri), random.Random(seed)
    for _ in range(40):
        bring(here, chance.choice(wanted), bucket)


def meet_a_full_disk(root: str, one: Wanted, uri: str, pipe: Connection) -> None:
    """Fetch where no file may become as large as the object."""
    here = Cache(Path(root))
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
    try:
        here.hold(one, bucket=open_bucket(uri))
    except NoRoomError as error:
        pipe.send(str(error))


def start(target: Any, *arguments: object) -> tuple[BaseProcess, Connection]:
    ours, theirs = cast("tuple[Connection, Connection]", SPAWN.Pipe())
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def told(pipe: Connection) -> Any:
    assert pipe.poll(DEADLINE), "the other process says nothing"
    return pipe.recv()


# --- one fetch each


def test_a_copy_is_fetched_once_and_stays(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    for _ in range(3):
        with os.fdopen(here.hold(one, bucket=bucket), "rb") as file:
            assert hashlib.sha256(file.read()).hexdigest() == one.sha256
    assert (here.counts.misses, here.counts.fetched, here.counts.hits) == (1, 1, 2)
    assert here.counts.fetched_bytes == SIZE
    assert [(copy.sha256, copy.bytes) for copy in here.copies()] == [(one.sha256, SIZE)]


def test_processes_that_want_the_same_at_once_ask_the_store_once(server: ObjectServer, tmp_path: Path) -> None:
    bucket = server.open()
    one = put(bucket, "a", size=PIECE_BYTES // 4)
    wire = Wire(server.port)
    with closing(wire), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", environment_for(wire.port)["AWS_ENDPOINT_URL"])
        started = [start(hold_until_told, str(tmp_path), one, bucket.uri) for _ in range(4)]
        assert [told(pipe) for _, pipe in started] == ["held"] * 4
        for process, pipe in started:
            pipe.send("end")
            process.join(DEADLINE)
    assert len([line for line in wire.requests if line.startswith("GET ")]) == 1
    counts = Cache(tmp_path).counts
    assert counts.fetched == 1
    assert counts.hits + counts.misses == 4


def test_a_fetch_whose_process_was_killed_is_begun_again(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a", size=PIECE_BYTES + SIZE)
    process, pipe = start(stop_in_the_middle, str(here.root), one, bucket.uri)
    assert told(pipe) == "middle"
    assert here.fetch(one, bucket=bucket) is None, "somebody is at it"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    bring(here, one, bucket)
    assert here.counts.taken_over == 0
    assert list((here.root / "partial").iterdir()) == []


def test_a_fetch_that_stands_still_is_taken_over(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a", size=PIECE_BYTES + SIZE)
    process, pipe = start(stop_in_the_middle, str(here.root), one, bucket.uri)
    assert told(pipe) == "middle"
    monkeypatch.setattr(cache, "LEASE_SECONDS", 0.1)
    bring(here, one, bucket)
    assert here.counts.taken_over == 1
    pipe.send("go on")
    assert told(pipe) is False, "it finds that another has done it"
    process.join(DEADLINE)
    with os.fdopen(here.hold(one, bucket=bucket), "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == one.sha256
    assert list((here.root / "partial").iterdir()) == []


def test_interrupted_and_started_again(bucket: Bucket, tmp_path: Path) -> None:
    """https://github.com/mosaicml/streaming/issues/781: a second start met what the first had left behind."""
    here, one = Cache(tmp_path / "cache"), put(bucket, "a", size=PIECE_BYTES + SIZE)
    for _ in range(2):
        process, pipe = start(stop_in_the_middle, str(here.root), one, bucket.uri)
        assert told(pipe) == "middle"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(DEADLINE)
        assert process.exitcode
        assert list((here.root / "partial").iterdir()) == []
    bring(here, one, bucket)


def test_a_fetch_that_is_given_up_leaves_nothing(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    with pytest.raises(StoppedError):
        here.fetch(one, bucket=bucket, stop=lambda: True)
    assert here.taken_bytes() == 0


def test_what_is_not_the_object_never_becomes_a_copy(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    for data in (b"short", bytes(SIZE), bytes(2 * SIZE)):
        bucket.put("a", data)
        with pytest.raises(DataError, match="damaged"):
            here.hold(one, bucket=bucket)
    bucket.delete(["a"])
    with pytest.raises(DataError, match="does not exist"):
        here.hold(one, bucket=bucket)
    assert here.taken_bytes() == 0


# --- the limit


def test_the_least_recently_used_goes_first(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache", limit_bytes=3 * SIZE)
    a, b, c, d = (put(bucket, key) for key in "abcd")
    for one in (a, b, c):
        bring(here, one, bucket)
    bring(here, a, bucket)
    bring(here, d, bucket)
    assert [is_here(here, one) for one in (a, b, c, d)] == [True, False, True, True]
    assert (here.counts.evicted, here.counts.evicted_bytes) == (1, SIZE)


def test_what_is_held_never_goes(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache", limit_bytes=2 * SIZE + 10)
    a, b, c = (put(bucket, key) for key in "abc")
    with os.fdopen(here.hold(b, bucket=bucket)):
        bring(here, a, bucket)
        with os.fdopen(here.hold(a, bucket=bucket)):
            with pytest.raises(NoRoomError) as caught:
                here.hold(c, bucket=bucket)
            assert all(text in str(caught.value) for text in (f"needs {SIZE}", "10 are left", "data.cache_limit"))
            assert here.prune() == 0
        bring(here, c, bucket)
        assert [is_here(here, one) for one in (a, b, c)] == [False, True, True]


def test_nothing_is_removed_for_what_would_not_fit_then(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache", limit_bytes=3 * SIZE)
    a, b = put(bucket, "a"), put(bucket, "b")
    large = put(bucket, "large", size=3 * SIZE)
    bring(here, a, bucket)
    with os.fdopen(here.hold(b, bucket=bucket)), pytest.raises(NoRoomError):
        here.hold(large, bucket=bucket)
    assert is_here(here, a)
    bring(here, large, bucket)
    assert not is_here(here, a)


def test_an_optional_copy_takes_nothing_from_datasets_in_use(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache", limit_bytes=4 * SIZE)
    a, b, c, d = (put(bucket, key) for key in "abcd")
    manifest = here.root / "datasets" / "pictures" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"splits": {"train": [{"sha256": a.sha256}, {"sha256": b.sha256}]}}))
    with os.fdopen(here.use("pictures")), os.fdopen(here.use("pictures")):
        for one in (a, b, c):
            bring(here, one, bucket)
        os.close(here.hold(d, bucket=bucket, optional=True))
        assert [is_here(here, one) for one in (a, b, c, d)] == [True, True, False, True], "a tenth stays free"
        bring(here, c, bucket)
        assert [is_here(here, one) for one in (a, b, c, d)] == [True] * 4
        os.close(here.hold(put(bucket, "e"), bucket=bucket, optional=True))
        assert [is_here(here, one) for one in (a, b, c, d)] == [True, True, False, False]
        with os.fdopen(here.hold(put(bucket, "e"), bucket=bucket)), pytest.raises(NoRoomError):
            here.hold(c, bucket=bucket, optional=True)
    os.close(here.hold(c, bucket=bucket, optional=True))
    assert not is_here(here, a), "nobody uses it any more"


def test_a_hold_ends_with_its_process(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache", limit_bytes=SIZE)
    a, b = put(bucket, "a"), put(bucket, "b")
    process, pipe = start(hold_until_told, str(here.root), a, bucket.uri)
    assert told(pipe) == "held"
    with pytest.raises(NoRoomError):
        here.hold(b, bucket=bucket)
    process.kill()
    process.join(DEADLINE)
    bring(here, b, bucket)
    assert not is_here(here, a)


def test_four_processes_keep_to_the_limit(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache", limit_bytes=5 * SIZE)
    wanted = [put(bucket, f"{number}") for number in range(12)]
    arguments = (str(here.root), wanted, bucket.uri)
    processes = [SPAWN.Process(target=use_many, args=(*arguments, seed), daemon=True) for seed in range(4)]
    for process in processes:
        process.start()
    until, most = time.monotonic() + DEADLINE, 0
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        most = max(most, here.taken_bytes())
    assert [process.exitcode for process in processes] == [0] * 4
    assert 3 * SIZE < most <= 5 * SIZE
    assert here.counts.evicted >= 7


def test_a_full_disk_is_told_with_numbers(bucket: Bucket, tmp_path: Path) -> None:
    one = put(bucket, "a")
    process, pipe = start(meet_a_full_disk, str(tmp_path / "cache"), one, bucket.uri)
    text = told(pipe)
    process.join(DEADLINE)
    assert f"needs {SIZE} bytes" in text
    assert "are free on the disk" in text
    assert "hint" in text
    assert Cache(tmp_path / "cache").taken_bytes() == 0


def test_the_limit_belongs_to_the_folder(tmp_path: Path) -> None:
    free = Cache(tmp_path).limit_bytes
    assert free > 0
    Cache(tmp_path, limit_bytes=1000)
    assert Cache(tmp_path).limit_bytes == 1000
    assert Cache(tmp_path, limit_bytes=2**60).limit_bytes < 2**60, "never more than the disk has"


def test_a_lower_limit_holds_at_once(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache")
    a, b, c = (put(bucket, key) for key in "abc")
    for one in (b, c):
        bring(here, one, bucket)
    with os.fdopen(here.hold(a, bucket=bucket)):
        bring(here, c, bucket)
        Cache(here.root, limit_bytes=2 * SIZE)
        assert [is_here(here, one) for one in (a, b, c)] == [True, False, True]
        Cache(here.root, limit_bytes=1)
        assert [is_here(here, one) for one in (a, b, c)] == [True, False, False], "what is held stays"


def test_prune_leaves_the_most_recently_used(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache")
    a, b, c = (put(bucket, key) for key in "abc")
    for one in (a, b, c):
        bring(here, one, bucket)
    assert here.prune(2 * SIZE) == SIZE
    assert [is_here(here, one) for one in (a, b, c)] == [False, True, True]
    assert here.prune() == 2 * SIZE


def test_there_may_be_more_copies_than_a_process_may_have_files_open(bucket: Bucket, tmp_path: Path) -> None:
    here = Cache(tmp_path / "cache", limit_bytes=200 * 100)
    small = [put(bucket, f"{number}", size=100) for number in range(200)]
    for one in small:
        bring(here, one, bucket)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 40, limits[1]))
    try:
        bring(here, put(bucket, "large", size=150 * 100), bucket)
        assert (here.counts.evicted, len(here.copies())) == (150, 51)
        assert here.prune() == 200 * 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_open_files_are_an_error_that_is_told(bucket: Bucket, tmp_path: Path) -> None:
    """A worker that died of it had a good sample quarantined."""
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    bring(here, one, bucket)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open("rb") as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, limits[1]))
        try:
            for call in (lambda: here.open(one), here.prune):
                with pytest.raises(UnreachableError, match="Too many open files"):
                    call()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_cache_that_is_removed_under_a_run_begins_anew(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    bring(here, one, bucket)
    shutil.rmtree(here.root)
    bring(here, one, bucket)
    assert is_here(here, one)


def test_what_cannot_be_counted_is_used_all_the_same(bucket: Bucket, tmp_path: Path) -> None:
    """Counts that cannot be written: another user's cache, a full disk."""
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    (here.root / "counts").mkdir()
    bring(here, one, bucket)
    bring(here, one, bucket)
    assert is_here(here, one)


def test_a_copy_that_has_to_be_there_is_durable_before_it_has_its_name(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large index is not read again to be verified, and after a crash of the machine it would be zeros."""
    here, one, other = Cache(tmp_path / "cache"), put(bucket, "a"), put(bucket, "b")
    had_name: list[bool] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        had_name.append(is_here(here, one))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    bring(here, one, bucket)
    os.close(here.hold(other, bucket=bucket, optional=True))
    assert had_name == [False]


# --- damage


def test_a_copy_of_another_length_is_fetched_again(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    bring(here, one, bucket)
    os.truncate(here.path(one.sha256), SIZE - 1)
    with os.fdopen(here.hold(one, bucket=bucket), "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == one.sha256
    assert (here.counts.damaged, here.counts.fetched) == (1, 2)


def test_of_those_who_find_damage_one_removes_the_copy(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    with ExitStack() as stack:
        old = [here.hold(one, bucket=bucket) for _ in range(2)]
        for descriptor in old:
            stack.callback(os.close, descriptor)
        here.discard(one, descriptor=old[0])
        bring(here, one, bucket)
        here.discard(one, descriptor=old[1])
        assert is_here(here, one), "the new copy is not the one that was damaged"
    assert here.counts.damaged == 1


def test_threads_share_a_cache_like_processes(bucket: Bucket, tmp_path: Path) -> None:
    here, one = Cache(tmp_path / "cache"), put(bucket, "a")
    threads = [threading.Thread(target=bring, args=(here, one, bucket)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert here.counts.fetched == 1
