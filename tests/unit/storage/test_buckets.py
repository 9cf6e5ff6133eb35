"""What every store promises, on each of them."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from spec.errors import DataError
from storage import Bucket, ExistsError, MissingError, StaleError
from storage.protocol import PIECE_BYTES

LARGE = os.urandom(2**20) * 40  # 40 MiB: three pieces


def keys(bucket: Bucket, prefix: str = "", **options: str) -> list[str]:
    return [entry.key for entry in bucket.list(prefix, **options)]


def test_what_was_written_is_read_with_its_tag(bucket: Bucket) -> None:
    tag = bucket.put("a/b.json", b"one")
    assert bucket.get("a/b.json").data == b"one"
    assert bucket.get("a/b.json").tag == tag
    again = bucket.put("a/b.json", b"two")
    assert again != tag
    assert bucket.get("a/b.json").data == b"two"
    assert bucket.exists("a/b.json")
    assert not bucket.exists("a")


def test_an_empty_object_is_one(bucket: Bucket) -> None:
    bucket.put("empty", b"")
    assert bucket.get("empty").data == b""
    assert bucket.read("empty") == b""
    assert bucket.write("streamed", []) == 0
    assert bucket.digest("streamed") == (0, hashlib.sha256().hexdigest())


@pytest.mark.parametrize("call", ["get", "read", "digest"])
def test_a_missing_object_is_said_with_its_place(bucket: Bucket, call: str) -> None:
    with pytest.raises(MissingError) as caught:
        getattr(bucket, call)("no/such")
    assert "no/such" in caught.value.where


def test_create_refuses_what_is_there_and_leaves_it(bucket: Bucket) -> None:
    tag = bucket.create("lock", b"mine")
    with pytest.raises(ExistsError):
        bucket.create("lock", b"yours")
    assert bucket.get("lock").data == b"mine"
    assert bucket.get("lock").tag == tag


def test_replace_takes_only_what_was_read(bucket: Bucket) -> None:
    first = bucket.create("HEAD", b"1")
    second = bucket.replace("HEAD", b"2", tag=first)
    with pytest.raises(StaleError):
        bucket.replace("HEAD", b"3", tag=first)
    assert bucket.get("HEAD").data == b"2"
    bucket.replace("HEAD", b"3", tag=second)
    assert bucket.get("HEAD").data == b"3"


def test_replacing_what_is_gone_is_refused(bucket: Bucket) -> None:
    tag = bucket.create("HEAD", b"1")
    bucket.delete(["HEAD"])
    with pytest.raises((StaleError, MissingError)):
        bucket.replace("HEAD", b"2", tag=tag)
    assert not bucket.exists("HEAD")


@pytest.mark.parametrize("call", ["create", "replace"])
def test_of_many_who_write_at_once_exactly_one_succeeds(bucket: Bucket, call: str) -> None:
    tag = bucket.create("HEAD", b"start") if call == "replace" else ""
    barrier, won, lost = threading.Barrier(6), list[bytes](), list[str]()

    def race(number: int) -> None:
        mine = f"writer {number}".encode()
        barrier.wait(20)
        try:
            bucket.replace("HEAD", mine, tag=tag) if tag else bucket.create("HEAD", mine)
        except (ExistsError, StaleError) as error:
            lost.append(type(error).__name__)
        else:
            won.append(mine)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(won), len(lost)) == (1, 5)
    assert bucket.get("HEAD").data == won[0]


def test_a_large_object_goes_there_and_back_in_pieces(bucket: Bucket, tmp_path: Path) -> None:
    assert len(LARGE) > 2 * PIECE_BYTES
    want = len(LARGE), hashlib.sha256(LARGE).hexdigest()
    pieces = [memoryview(LARGE)[start : start + 3_000_001] for start in range(0, len(LARGE), 3_000_001)]
    assert bucket.write("large", iter(pieces)) == len(LARGE)
    assert bucket.digest("large") == want
    assert bucket.read("large") == LARGE
    assert bucket.fetch("large", tmp_path / "deep" / "copy", sha256=want[1]) == len(LARGE)
    assert (tmp_path / "deep" / "copy").read_bytes() == LARGE
    assert bucket.send("sent", tmp_path / "deep" / "copy") == len(LARGE)
    assert bucket.digest("sent") == want
    assert b"".join(bucket.pieces("large")) == LARGE
    assert (
        bytes(bucket.read_range("large", offset=PIECE_BYTES - 5, size=10)) == LARGE[PIECE_BYTES - 5 : PIECE_BYTES + 5]
    )
    with pytest.raises(DataError, match="7 bytes came instead of 10"):
        bucket.read_range("large", offset=len(LARGE) - 7, size=10)
    with pytest.raises(MissingError):
        bucket.read_range("none", offset=0, size=10)
    with pytest.raises(MissingError):
        list(bucket.pieces("none"))


def test_a_file_with_other_bytes_never_appears(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("a", b"damaged")
    with pytest.raises(DataError, match="damaged"):
        bucket.fetch("a", tmp_path / "copy", sha256=hashlib.sha256(b"whole").hexdigest())
    with pytest.raises(MissingError):
        bucket.fetch("b", tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir() if path.name != "bucket"] == []


def test_a_source_that_breaks_off_leaves_the_former_object(bucket: Bucket) -> None:
    bucket.put("a", b"former")

    def broken() -> object:
        yield LARGE[:PIECE_BYTES]
        yield LARGE[:PIECE_BYTES]
        raise DataError("the source is gone")

    with pytest.raises(Exception, match="the source is gone"):
        bucket.write("a", broken())  # type: ignore[arg-type]
    assert bucket.get("a").data == b"former"
    assert keys(bucket) == ["a"]


def test_a_listing_is_sorted_holds_its_folder_only_and_can_begin_behind_a_key(bucket: Bucket) -> None:
    for key in ("b/2", "b/10", "b-c/1", "a", "b/x/1"):
        bucket.put(key, key.encode())
    assert keys(bucket) == ["a", "b-c/1", "b/10", "b/2", "b/x/1"]
    assert keys(bucket, "b") == keys(bucket, "b/") == ["b/10", "b/2", "b/x/1"]
    assert keys(bucket, "b", after="b/10") == ["b/2", "b/x/1"]
    assert keys(bucket, "nothing") == []
    assert {entry.key: entry.size for entry in bucket.list("b-c")} == {"b-c/1": 5}
    assert bucket.folders() == ["b", "b-c"]
    assert bucket.folders("b") == ["x"]
    assert bucket.folders("nothing") == []


def test_a_deeper_bucket_sees_its_part(bucket: Bucket) -> None:
    below = bucket.below("runs/one")
    below.put("events/1", b"x")
    assert below.uri == f"{bucket.uri}/runs/one"
    assert keys(below) == ["events/1"]
    assert keys(bucket) == ["runs/one/events/1"]
    assert below.below("events").get("1").data == b"x"


def test_more_objects_than_one_page_are_all_listed_and_deleted(bucket: Bucket) -> None:
    names = [f"many/{number:05d}" for number in range(1203)]
    for name in names:
        bucket.put(name, b"")
    assert keys(bucket, "many") == names
    bucket.delete([*names[:1101], "many/gone"])
    assert keys(bucket) == names[1101:]
    bucket.clear("many")
    assert keys(bucket) == []
    assert bucket.folders() == []
    bucket.clear("many")


def test_the_stores_clock_is_in_seconds_since_1970(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("now", b"")
    (tmp_path / "now").touch()
    (entry,) = bucket.list()
    assert abs(entry.modified - (tmp_path / "now").stat().st_mtime) < 3


@pytest.mark.parametrize("key", ["/absolute", "a/../../b", ".."])
def test_a_key_cannot_leave_its_bucket(bucket: Bucket, key: str) -> None:
    with pytest.raises(ValueError, match="not a relative path inside the bucket"):
        bucket.put(key, b"")


def test_names_with_signs_and_spaces_stay_as_they_are(bucket: Bucket) -> None:
    names = sorted(["with space", "plus+sign", "é", "a%2Fb", "q?x=1#y"])
    for name in names:
        bucket.put(f"odd/{name}", name.encode())
    assert keys(bucket, "odd") == [f"odd/{name}" for name in names]
    assert [bucket.get(f"odd/{name}").data.decode() for name in names] == names
