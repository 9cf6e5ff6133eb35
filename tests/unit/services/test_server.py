"""Server: real sockets, real threads, a service that computes only when the test lets it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from services.client import ServiceClient
from services.directory import write_directory
from services.server import Server
from services.service import Service
from services.wire.frames import Header, Kind, Message, encode_body, pack, unpack
from spec.errors import ConfigError, RefusedError
from spec.services import Directory, Replica
from tests.builders.echo import Echo, EchoArgs, EchoReply, Gated, context

SECONDS = 20.0


@contextmanager
def serving(service: Service, tmp_path: Path, *, queue_depth: int = 8) -> Generator[tuple[Server, Path]]:
    """A running server and the directory file that names it."""
    path = tmp_path / "directory.json"
    with Server(service, queue_depth=queue_depth, incarnation=7) as server:
        replica = Replica(service="echo", kind="encode", index=0, endpoint=server.endpoint, incarnation=7)
        write_directory(path, directory=Directory(epoch=1, replicas=[replica]))
        yield server, path


def until(server: Server, condition: Callable[[dict[str, int]], bool]) -> None:
    """Ask the server for its queues until they are as wanted; each question is a round through its loop."""
    limit = time.monotonic() + SECONDS
    while not condition(server.stats(timeout_seconds=SECONDS).queued_by_rank):
        assert time.monotonic() < limit, server.stats(timeout_seconds=SECONDS)


class Peer:
    """A peer that speaks to the socket directly, and so can break the rules."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        self._socket.connect(endpoint)

    def send(self, *frames: Any) -> None:
        self._socket.send_multipart(frames)

    def hello(self, identity: str) -> None:
        self.send(*pack(Header(kind=Kind.HELLO, identity=identity, incarnation=1, service="echo")))
        assert self.receive().header.kind is Kind.WELCOME

    def request(self, number: int, text: str) -> None:
        header = Header(kind=Kind.REQUEST, request=number, method="echo", deadline_ms=60_000)
        self.send(*pack(header, encode_body(EchoArgs(text=text))))

    def receive(self) -> Message:
        return unpack(self._socket.recv_multipart())

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_a_flooding_rank_delays_a_quiet_one_by_no_more_than_the_running_batch(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=4))
    with (
        serving(service, tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="flood")) as flood,
        closing(ServiceClient(path, service="echo", identity="quiet")) as quiet,
    ):
        many = [
            flood.submit("echo", EchoArgs(text="flood"), reply=EchoReply, deadline_seconds=SECONDS) for _ in range(200)
        ]
        assert service.began.acquire(timeout=SECONDS)
        for _ in range(5):
            until(server, lambda queued: queued.get("flood", 0) >= 4)
            before = len(service.batches)  # one batch is running and not in the list yet
            future = quiet.submit("echo", EchoArgs(text="quiet"), reply=EchoReply, deadline_seconds=SECONDS)
            until(server, lambda queued: queued.get("quiet", 0) == 1)
            service.permits.release(2)
            assert future.result(SECONDS).body.text == "quiet"
            assert ["quiet" in batch for batch in service.batches[before : before + 2]] == [False, True]
            assert service.began.acquire(timeout=SECONDS)
            assert service.began.acquire(timeout=SECONDS)
        service.permits.release(1000)
        assert all(future.result(SECONDS).body.text == "flood" for future in many)


def test_a_flooding_rank_never_has_more_than_its_grant_at_the_server(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=4))
    with (
        serving(service, tmp_path, queue_depth=6) as (server, path),
        closing(ServiceClient(path, service="echo", identity="flood")) as flood,
    ):
        many = [flood.submit("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=SECONDS) for _ in range(50)]
        service.permits.release(1000)
        for future in many:
            future.result(SECONDS)
            assert server.stats(timeout_seconds=SECONDS).queued <= 6
        stats = server.stats(timeout_seconds=SECONDS)
    assert (stats.requests, stats.violations) == (50, 0)


def test_a_peer_that_ignores_its_grant_is_dropped_and_nobody_else_notices(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=4))
    with serving(service, tmp_path, queue_depth=2) as (server, path):
        rude = Peer(server.endpoint)
        with closing(rude), closing(ServiceClient(path, service="echo", identity="quiet")) as quiet:
            rude.hello("rude")
            for number in range(1, 100):
                rude.request(number, "rude")
            while rude.receive().header.kind is not Kind.GOAWAY:
                pass
            service.permits.release(1000)

            reply = quiet.call("echo", EchoArgs(text="quiet"), reply=EchoReply, deadline_seconds=SECONDS)

            assert reply.body.text == "quiet"
            assert server.stats(timeout_seconds=SECONDS).banned == 1
            assert sum(batch.count("rude") for batch in service.batches) <= 2


def test_calls_that_wait_are_computed_together_up_to_the_limit(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=4))
    with (
        serving(service, tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        first = client.submit("echo", EchoArgs(text="first"), reply=EchoReply, deadline_seconds=SECONDS)
        assert service.began.acquire(timeout=SECONDS)
        rest = [client.submit("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=SECONDS) for _ in range(6)]
        until(server, lambda queued: queued.get("rank-0", 0) == 6)
        service.permits.release(1000)

        assert first.result(SECONDS).body.batch == 1
        assert [future.result(SECONDS).body.batch for future in rest] == [4, 4, 4, 4, 2, 2]


def test_calls_of_different_keys_are_never_computed_together(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=8))
    with (
        serving(service, tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        first = client.submit("echo", EchoArgs(text="first"), reply=EchoReply, deadline_seconds=SECONDS)
        assert service.began.acquire(timeout=SECONDS)
        for number in range(6):
            key = "ab"[number % 2]
            args = EchoArgs(text=key, key=key)
            first = client.submit("echo", args, reply=EchoReply, deadline_seconds=SECONDS)
        until(server, lambda queued: queued.get("rank-0", 0) == 6)
        service.permits.release(1000)
        first.result(SECONDS)
    assert all(len(set(batch)) == 1 for batch in service.batches)


def test_a_call_that_breaks_the_service_fails_alone(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=4))
    with (
        serving(service, tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        client.submit("echo", EchoArgs(text="first"), reply=EchoReply, deadline_seconds=SECONDS)
        assert service.began.acquire(timeout=SECONDS)
        futures = [
            client.submit("echo", EchoArgs(text=text), reply=EchoReply, deadline_seconds=SECONDS)
            for text in ("break", "good", "refuse")
        ]
        until(server, lambda queued: sum(queued.values()) == 3)
        service.permits.release(1000)

        assert futures[1].result(SECONDS).body.text == "good"
        with pytest.raises(RefusedError, match="ZeroDivisionError: a bug"):
            futures[0].result(SECONDS)
        with pytest.raises(RefusedError, match="the text is 'refuse'") as refusal:
            futures[2].result(SECONDS)
        assert refusal.value.hint == "send another text"
        assert server.stats(timeout_seconds=SECONDS).errors == 2


def test_tensors_travel_there_and_back_unchanged(tmp_path: Path) -> None:
    tensors = {"large": np.arange(500_000, dtype=np.float32), "none": np.zeros((0, 3), np.uint8), "one": np.array(2.5)}
    with (
        serving(Echo(context(tmp_path)), tmp_path) as (_, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        reply = client.call("echo", EchoArgs(text="x"), reply=EchoReply, tensors=tensors, deadline_seconds=SECONDS)

    assert reply.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(reply.tensors[name], tensor)


def test_garbage_on_the_port_is_answered_counted_and_survived(tmp_path: Path) -> None:
    with serving(Echo(context(tmp_path)), tmp_path) as (server, path):
        peer = Peer(server.endpoint)
        with closing(peer), closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            peer.send(b"\x80\x04cposix\nsystem\n", b"(S'id'\ntR.")
            assert peer.receive().header.kind is Kind.ERROR
            reply = client.call("echo", EchoArgs(text="fine"), reply=EchoReply, deadline_seconds=SECONDS)

            assert reply.body.text == "fine"
            assert server.stats(timeout_seconds=SECONDS).violations == 1


def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with Server(Echo(context(tmp_path)), queue_depth=1) as first:
        second = Server(Echo(context(tmp_path)), queue_depth=1, bind=first.endpoint)
        with pytest.raises(ConfigError, match="cannot listen on tcp://"):
            second.start()


def test_a_server_binds_to_loopback_unless_told_otherwise(tmp_path: Path) -> None:
    with Server(Echo(context(tmp_path)), queue_depth=1) as server:
        assert server.endpoint.startswith("tcp://127.0.0.1:")


def test_a_stopped_server_says_so(tmp_path: Path) -> None:
    server = Server(Echo(context(tmp_path)), queue_depth=1)
    server.start()
    assert server.stop(deadline_seconds=SECONDS)

    assert not server.serving
    with pytest.raises(RuntimeError, match="not serving"):
        server.stats(timeout_seconds=1)
