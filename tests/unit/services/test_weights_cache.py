"""Models are fetched by digest once, whole, verified, bounded in size and time, from servers good and bad."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from services.weights_cache import Limits, WeightsCache
from spec.errors import RefusedError
from tests.builders.object_store import environment_of, serve_objects

CONTENT = b"weights" * 50_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HURRIED = Limits(deadline_seconds=0.5, silence_seconds=0.3)


class Handler(http.server.BaseHTTPRequestHandler):
    """Paths say how the server behaves; `released` ends those that hang."""

    released: threading.Event
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/silent":
            self.released.wait(30)
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/cut":  # a fifth of it at a time
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(CONTENT) - start))
            self.end_headers()
            self.wfile.write(CONTENT[start : start + len(CONTENT) // 5])
            return
        self.send_response(200)
        if self.path == "/torn":
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:1000])
            return
        self.end_headers()
        try:
            if self.path == "/endless":
                while not self.released.is_set():
                    self.wfile.write(b"x" * 65536)
            elif self.path == "/drip":
                while not self.released.wait(0.02):
                    self.wfile.write(b"x")
            else:
                self.wfile.write(b"other" if self.path == "/other" else CONTENT)
        except ConnectionError:
            pass

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


class Server:
    def __init__(self) -> None:
        self.released, self.asked = threading.Event(), list[str]()
        handler = type("Bound", (Handler,), {"released": self.released, "asked": self.asked})
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=functools.partial(self.http.serve_forever, poll_interval=0.02))
        self.thread.start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/{path}"

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(10)


@pytest.fixture
def server() -> Generator[Server]:
    one = Server()
    yield one
    one.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_model_is_fetched_once(tmp_path: Path, server: Server) -> None:
    cache = WeightsCache(tmp_path / "models")
    for _ in range(3):
        path = cache.get(SHA256, urls=[server.url("good")])
        assert path.read_bytes() == CONTENT
    assert server.asked == ["/good"]
    assert names(tmp_path / "models") == [f"{SHA256}.safetensors"]


def test_a_file_address_works_and_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "with space %.bin"
    source.write_bytes(CONTENT)
    path = WeightsCache(tmp_path / "models").get(SHA256, urls=[source.as_uri()])
    source.unlink()
    assert path.read_bytes() == CONTENT


def test_the_next_address_is_tried_when_one_fails(tmp_path: Path, server: Server) -> None:
    urls = [server.url("missing"), server.url("other"), server.url("torn"), server.url("good")]
    assert WeightsCache(tmp_path).get(SHA256, urls=urls).read_bytes() == CONTENT
    assert names(tmp_path) == [f"{SHA256}.safetensors"]


def test_a_replica_without_the_runs_keys_takes_the_model_from_the_runs_bucket(tmp_path: Path) -> None:
    with serve_objects(tmp_path) as store, environment_of(store):
        bucket = store.open()
        bucket.put("models/m.safetensors", CONTENT)
        urls = [f"https://127.0.0.1:1/v1/r1/models/{SHA256}", f"{bucket.uri}/models/m.safetensors"]
        assert WeightsCache(tmp_path / "models").get(SHA256, urls=urls).read_bytes() == CONTENT
        missing = [f"{bucket.uri}/models/none.safetensors"]
        with pytest.raises(RefusedError, match=r"could not be had: .*none\.safetensors"):
            WeightsCache(tmp_path / "others").get(SHA256, urls=missing)
        small = Limits(max_bytes=len(CONTENT) - 1)
        with pytest.raises(RefusedError, match="it is larger than"):
            WeightsCache(tmp_path / "others", limits=small).get(SHA256, urls=urls)
        assert names(tmp_path / "others") == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "answered 404"),
        ("other", "it has the digest d9298a10d1b0, not the one asked for"),
        ("torn", "to go on after 1,000 bytes"),
        ("endless", "larger than 1,000,000 bytes"),
        ("drip", "not complete after 0 s"),
        ("silent", "timed out"),
    ],
)
def test_a_bad_server_is_refused_in_time_and_leaves_nothing(
    tmp_path: Path, server: Server, path: str, said: str
) -> None:
    limits = Limits(max_bytes=1_000_000, deadline_seconds=0.4, silence_seconds=0.3)
    started = time.monotonic()
    with pytest.raises(RefusedError, match=said) as refused:
        WeightsCache(tmp_path, limits=limits).get(SHA256, urls=[server.url(path)])
    assert time.monotonic() - started < 5
    assert server.url(path) in refused.value.message
    assert "syncer" in refused.value.hint
    assert names(tmp_path) == []


def test_what_a_killed_fetch_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: Path, server: Server
) -> None:
    """Each replica that was killed while it fetched left a part of a model on the node's disk, for good."""
    code = (
        "import sys; from pathlib import Path; from services.weights_cache import WeightsCache;"
        "WeightsCache(Path(sys.argv[1])).get(sys.argv[2], urls=[sys.argv[3]])"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path, SHA256, server.url("drip")]) as killed:
        limit = time.monotonic() + 30
        while not names(tmp_path):
            assert time.monotonic() < limit
        killed.kill()
    (left,) = tmp_path.iterdir()
    WeightsCache(tmp_path).get(SHA256, urls=[server.url("good")])
    assert len(names(tmp_path)) == 2  # it may be another replica's, which is not done

    hours_ago = time.time() - 7200
    os.utime(left, (hours_ago, hours_ago))
    (tmp_path / f"{SHA256}.safetensors").unlink()
    WeightsCache(tmp_path).get(SHA256, urls=[server.url("good")])
    assert names(tmp_path) == [f"{SHA256}.safetensors"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///no/such/file", "no such file"),
        ("file:///dev/zero", "no such file"),
        ("https://127.0.0.1/x", "https:// with the keys of a run"),
        ("ftp://127.0.0.1/x", "only file://, gs://, s3:// and http://"),
        ("http:///x", "only file://, gs://, s3:// and http://"),
        ("http://127.0.0.1:1/x", "refused"),
    ],
)
def test_an_address_that_leads_nowhere_is_named(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        WeightsCache(tmp_path, limits=HURRIED).get(SHA256, urls=[url])


def test_no_address_and_no_digest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="names no address"):
        WeightsCache(tmp_path).get(SHA256, urls=[])
    for name in ("", "..", "/etc/passwd", "A" * 64, SHA256 + "\n"):
        with pytest.raises(RefusedError, match="is not a sha256"):
            WeightsCache(tmp_path).get(name, urls=["file:///etc/hostname"])


def test_a_damaged_file_of_the_cache_is_fetched_again(tmp_path: Path, server: Server) -> None:
    path = WeightsCache(tmp_path).get(SHA256, urls=[server.url("good")])
    path.write_bytes(CONTENT[:-1])
    assert WeightsCache(tmp_path).get(SHA256, urls=[server.url("good")]).read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_fetch_that_is_cut_goes_on_where_it_was(tmp_path: Path, server: Server) -> None:
    assert WeightsCache(tmp_path).get(SHA256, urls=[server.url("cut")]).read_bytes() == CONTENT
    assert server.asked == ["/cut"] * 5


def test_only_the_models_used_last_stay(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "models", limits=Limits(kept_files=2))
    digests: list[str] = []
    for number in range(4):
        content = str(number).encode()
        source = tmp_path / str(number)
        source.write_bytes(content)
        digests.append(hashlib.sha256(content).hexdigest())
        path = cache.get(digests[-1], urls=[source.as_uri()])
        os.utime(path, (number, number))
    assert names(tmp_path / "models") == sorted(f"{digest}.safetensors" for digest in digests[-2:])
