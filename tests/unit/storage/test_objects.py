"""An object store that fails: gone, refusing, losing its answers. Each call ends, and says which it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec.errors import ConfigError, RefusedError, UnreachableError
from storage import Bucket, ExistsError, StaleError, file_path, open_bucket, split_uri
from tests.builders.object_store import (
    BUCKET,
    QUICK,
    ObjectServer,
    Wire,
    environment_for,
    free_port,
    serve_objects,
)


@pytest.fixture
def wire(server: ObjectServer) -> Iterator[Wire]:
    one = Wire(server.port)
    yield one
    one.close()


@pytest.fixture
def behind(wire: Wire, server: ObjectServer) -> Bucket:
    """A bucket that is reached over the wire."""
    return open_bucket(server.uri(), environment=environment_for(wire.port), limits=QUICK)


def writes(wire: Wire) -> int:
    return sum(one.startswith("PUT ") for one in wire.requests)


def test_a_created_object_whose_answer_is_lost_counts_as_created(behind: Bucket, wire: Wire) -> None:
    wire.lose_answers = 1
    tag = behind.create("lock", b"writer 1")
    assert behind.get("lock").tag == tag
    assert writes(wire) == 1, "it was read back, not written again"
    with pytest.raises(ExistsError):
        behind.create("lock", b"writer 1")


def test_a_replaced_object_whose_answer_is_lost_counts_as_replaced(behind: Bucket, wire: Wire) -> None:
    first = behind.create("HEAD", b"1")
    wire.lose_answers = 1
    second = behind.replace("HEAD", b"2", tag=first)
    assert behind.get("HEAD").data == b"2"
    assert writes(wire) == 2
    behind.replace("HEAD", b"3", tag=second)


def test_a_plain_write_is_repeated(behind: Bucket, wire: Wire) -> None:
    wire.lose_answers = 1
    behind.put("a", b"x")
    assert (behind.get("a").data, writes(wire)) == (b"x", 2)


@pytest.mark.parametrize("call", ["create", "replace"])
def test_a_write_that_lost_against_another_is_refused_even_if_its_answer_was_lost(
    server: ObjectServer, tmp_path: Path, call: str
) -> None:
    """The request itself never arrives; while it is unclear, somebody else writes."""
    uri, dead = server.uri(), free_port()
    other = server.open(uri)
    tag = other.create("HEAD", b"0") if call == "replace" else ""
    mine = open_bucket(uri, environment=environment_for(dead), limits=QUICK)
    other.replace("HEAD", b"theirs", tag=tag) if tag else other.create("HEAD", b"theirs")
    wire = Wire(server.port)
    try:
        mine = open_bucket(uri, environment=environment_for(wire.port), limits=QUICK)
        wire.lose_answers = 1
        with pytest.raises((ExistsError, StaleError)):
            mine.replace("HEAD", b"mine", tag=tag) if tag else mine.create("HEAD", b"mine")
    finally:
        wire.close()
    assert other.get("HEAD").data == b"theirs"


@pytest.mark.parametrize("call", ["get", "put", "create", "list", "send", "digest"])
def test_a_server_that_is_gone_ends_every_call_in_time(call: str, tmp_path: Path) -> None:
    bucket = open_bucket("s3://bucket/x", environment=environment_for(free_port()), limits=QUICK)
    (tmp_path / "file").write_bytes(b"x")
    calls = {
        "get": lambda: bucket.get("a"),
        "put": lambda: bucket.put("a", b""),
        "create": lambda: bucket.create("a", b""),
        "list": lambda: list(bucket.list()),
        "send": lambda: bucket.send("a", tmp_path / "file"),
        "digest": lambda: bucket.digest("a"),
    }
    started = time.monotonic()
    with pytest.raises(UnreachableError, match="the object store failed") as caught:
        calls[call]()
    assert time.monotonic() - started < 8
    assert "check the endpoint" in caught.value.hint
    assert caught.value.where.startswith("s3://bucket/x")


def test_a_server_that_comes_back_in_time_is_not_noticed(tmp_path: Path) -> None:
    with serve_objects(tmp_path) as server:
        bucket = server.open()
        tag = bucket.create("HEAD", b"1")
        server.stop()
        server.start()
        assert bucket.replace("HEAD", b"2", tag=tag)
        assert bucket.get("HEAD").data == b"2"


def test_wrong_credentials_are_refused_with_the_remedy(server: ObjectServer) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        bucket = open_bucket(f"s3://{BUCKET}/x", environment={**server.environment, name: "wrong"}, limits=QUICK)
        for call in (lambda one=bucket: one.get("a"), lambda one=bucket: one.create("a", b"")):
            with pytest.raises(RefusedError, match="access is refused") as caught:
                call()
            assert "check the credentials" in caught.value.hint


def test_a_bucket_that_does_not_exist_is_said_so(server: ObjectServer) -> None:
    bucket = server.open("s3://no-such-bucket/x", limits=QUICK)
    with pytest.raises(RefusedError, match="bucket") as caught:
        bucket.put("a", b"")
    assert "create the bucket" in caught.value.hint


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("bucket/x", "names no store"),
        ("http://host/x", "names no store"),
        ("s3:///x", "names no bucket"),
        ("file://host/x", "not absolute"),
        ("file:x", "not absolute"),
    ],
)
def test_a_uri_that_names_no_store_is_refused(uri: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_bucket(uri)


def test_uris_are_taken_apart() -> None:
    assert split_uri("s3://b/data/digits/manifest.json") == ("s3://b/data/digits", "manifest.json")
    assert file_path("file:///a%20b/c") == Path("/a b/c")
    assert file_path("s3://b/c") is None
