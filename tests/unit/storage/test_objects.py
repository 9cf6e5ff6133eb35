"""An object store that fails: gone, refusing, losing its answers. Each call ends, and says which it was."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest

from spec.errors import ConfigError, RefusedError, UnreachableError
from storage import Bucket, ExistsError, Limits, StaleError, file_path, open_bucket, split_uri
from storage.errors import answer_of
from tests.builders.object_store import BUCKET, QUICK, ObjectServer, Wire, environment_for, serve_objects
from training.processes import free_port


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


def test_a_request_that_never_ends_is_given_up_with_its_place() -> None:
    with pytest.raises(UnreachableError, match=r"s3://b/k: the store has not answered for 0\.01 s"):
        answer_of(Future[bytes](), seconds=0.01, where="s3://b/k")
    failed = Future[bytes]()
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        answer_of(failed, seconds=1, where="s3://b/k")


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
        ("s3://bucket/a#b", "%23 for #"),
        ("file:///a?b", "%3F for ?"),
    ],
)
def test_a_uri_that_names_no_store_is_refused(uri: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_bucket(uri)


PATIENT = Limits(connect_seconds=20, request_seconds=30, retry_seconds=20)


class CloudStorage(http.server.BaseHTTPRequestHandler):
    """As much of Google Cloud Storage as deleting takes: one request for each object, and an answer for none."""

    protocol_version = "HTTP/1.1"
    names: ClassVar[set[str]]

    def do_DELETE(self) -> None:
        name = unquote(self.path).removeprefix("/bucket/")
        found = name in self.names
        self.names.discard(name)
        with contextlib.suppress(ConnectionError):  # the client lets its other requests be
            self.send_response(204 if found else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def test_deleting_does_not_end_at_an_object_that_is_gone() -> None:
    class Served(CloudStorage):
        names: ClassVar[set[str]] = {f"x/{number}" for number in range(1, 60)}

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # all sixty come at once; what finds the queue full comes again a second later

    with Server(("127.0.0.1", 0), Served) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        key = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True}
        key |= {"client_email": "", "private_key": "", "private_key_id": ""}
        environment = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "AWS_ALLOW_HTTP": "true"}
        try:
            open_bucket("gs://bucket/x", environment=environment, limits=PATIENT).delete(f"{n}" for n in range(60))
        finally:
            server.shutdown()
            thread.join(20)
    assert Served.names == set()


def test_uris_are_taken_apart() -> None:
    assert split_uri("s3://b/data/digits/manifest.json") == ("s3://b/data/digits", "manifest.json")
    assert file_path("file:///a%20b/c") == Path("/a b/c")
    assert file_path("s3://b/c") is None
