"""A real object store for tests: versitygw, S3 over a folder, on loopback; and a wire to it that can be cut."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from storage import Bucket, Limits, open_bucket
from tools.binaries import binary
from training.processes import free_port

DEADLINE = 20.0
ACCESS, SECRET = "test-access", "test-secret"
BUCKET = "bucket"
QUICK = Limits(connect_seconds=1, request_seconds=5, retry_seconds=1)


@dataclass
class ObjectServer:
    """One versitygw process. `stop` and `start` keep port and content."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to know besides the URI."""
        return environment_for(self.port)

    def start(self) -> None:
        """Returns when it takes connections."""
        (self.folder / BUCKET).mkdir(parents=True, exist_ok=True)
        options = ["--port", f"127.0.0.1:{self.port}", "--access", ACCESS, "--secret", SECRET, "--quiet"]
        with (self.folder.parent / "versitygw.log").open("ab") as log:
            command = [str(binary("versitygw")), *options, "posix", str(self.folder)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + DEADLINE
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self.process.poll() is None, (self.folder.parent / "versitygw.log").read_text()
            assert time.monotonic() < until, "versitygw does not answer"
            threading.Event().wait(0.02)

    def stop(self) -> None:
        """The server is gone, its content stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE)
            self.process = None

    def uri(self) -> str:
        """A prefix that nobody has used before."""
        return f"s3://{BUCKET}/{secrets.token_hex(8)}"

    def open(self, uri: str = "", *, limits: Limits | None = None) -> Bucket:
        """A bucket of this server."""
        return open_bucket(uri or self.uri(), environment=self.environment, limits=limits)


@contextmanager
def serve_objects(folder: Path) -> Generator[ObjectServer]:
    """A server over `folder`; the test is skipped if versitygw is not built."""
    try:
        binary("versitygw")
    except SystemExit as error:
        pytest.skip(str(error))
    server = ObjectServer(folder / "objects", free_port())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def environment_for(port: int) -> dict[str, str]:
    """Settings of a client of whatever listens on this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def environment_of(server: ObjectServer) -> Generator[None]:
    """Reach this server from code that reads the process's own environment."""
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass
class Wire:
    """A TCP connection to a server that loses answers when told to."""

    target: int
    lose_answers: int = 0
    """So many of the next answers to writes never arrive; their requests do."""
    cut_then: bool = False
    """After a lost answer nothing passes any more."""
    cut: bool = False
    """Nothing passes."""
    fail_reads: int = 0
    """So many of the next reads of tar files are answered with an error that is not repeated."""
    requests: list[str] = field(default_factory=list[str])
    """First lines of the requests that passed."""

    def __post_init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                if self.cut:
                    client.close()
                    continue
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        """One request and its answer at a time."""
        with client, socket.create_connection(("127.0.0.1", self.target), timeout=DEADLINE) as server:
            client.settimeout(DEADLINE)
            with suppress(OSError, ValueError), client.makefile("rb") as asked, server.makefile("rb") as answered:
                while (head := _read_head(asked)) and not self.cut:
                    first = head.split(b"\r\n", 1)[0].decode()
                    self.requests.append(first)
                    if first.startswith("GET ") and ".tar" in first and self.fail_reads > 0:
                        self.fail_reads -= 1
                        client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                        continue
                    server.sendall(head + asked.read(_length(head)))
                    answer = _read_head(answered)
                    body = b"" if first.startswith("HEAD ") else answered.read(_length(answer))
                    if first.startswith("PUT ") and self.lose_answers > 0:
                        self.lose_answers -= 1
                        self.cut = self.cut_then
                        return
                    client.sendall(answer + body)


def _read_head(stream: object) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()  # type: ignore[attr-defined]
        if not line:
            return b""
        head += line
    return head


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
