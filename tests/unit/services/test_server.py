"""Server: real sockets, real threads, a service that computes only when the test lets it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from services.aio import AsyncServiceClient
from services.client import LocalClient, ServiceClient
from services.directory import write_directory
from services.reception import ClientId
from services.scheduler import Ticket
from services.server import Server, answer_batch
from services.service import Call, Reply, Service, ServiceContext
from services.wire.frames import Header, Kind, Message, encode_body, pack, unpack
from services.wire.seal import accept_challenge, new_nonce
from spec.errors import ConfigError, DataError, GkrError, RefusedError, UnreachableError
from spec.services import Directory, Replica
from tests.builders.echo import Echo, EchoArgs, EchoReply, Gated, context

SECONDS = 20.0


@contextmanager
def serving(
    service: Service, tmp_path: Path, *, queue_depth: int = 8, queue_bytes: int = 0, secret: bytes = b""
) -> Generator[tuple[Server, Path]]:
    """A running server and the directory file that names it."""
    path = tmp_path / "directory.json"
    with Server(
        service, queue_depth=queue_depth, queue_bytes=queue_bytes, secret=secret, budget_bytes=2**30, incarnation=7
    ) as server:
        replica = Replica(
            service="echo", kind="encode", index=0, endpoint=server.endpoint, incarnation=7, sealed=bool(secret)
        )
        write_directory(path, directory=Directory(epoch=1, replicas=[replica]))
        yield server, path


def until(server: Server, condition: Callable[[dict[str, int]], bool]) -> None:
    """Ask the server for its queues until they are as wanted; each question is a round through its loop."""
    limit = time.monotonic() + SECONDS
    while not condition(server.stats(timeout_seconds=SECONDS).queued_by_rank):
        assert time.monotonic() < limit, server.stats(timeout_seconds=SECONDS)


class Peer:
    """A peer that speaks to the socket directly, and so can break the rules."""

    def __init__(self, endpoint: str, *, most_unread: int = 1000) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVHWM, most_unread)
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

    def receive_raw(self) -> list[bytes]:
        return self._socket.recv_multipart()

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
    """S6: the weights that a call asks for are its key (`test_sample`)."""
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


class Odd(Echo):
    """Answers or raises what nobody can send."""

    def _answer(self, call: Call, *, size: int) -> Reply | GkrError:
        match call.args.text:
            case "body":
                return Reply(EchoReply(text="x", batch=np.float32(1)))  # type: ignore[arg-type]
            case "tensor":
                return Reply(EchoReply(text="x", batch=size), {"x": [1, 2]})  # type: ignore[dict-item]
            case "nothing":
                return None  # type: ignore[return-value]
            case "surrogate":
                return DataError("there is no \udcff.png")
            case "raised":
                raise ValueError("there is no \udcff.png")
            case _:
                return super()._answer(call, size=size)


@pytest.mark.parametrize("text", ["body", "tensor", "nothing", "surrogate", "raised"])
def test_an_answer_that_cannot_travel_fails_alone_and_the_replica_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """It ended the thread that computes; the request was sent again, and ended the next replica."""
    caplog.set_level(logging.CRITICAL, "services.server")  # half a surrogate pair breaks what carries reports of tests
    service = Odd(context(tmp_path))
    with (
        serving(service, tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        for _ in range(2):
            asked = [
                client.submit("echo", EchoArgs(text=one), reply=EchoReply, deadline_seconds=SECONDS)
                for one in (text, "good")
            ]
            assert asked[1].result(SECONDS).body.text == "good"
            with pytest.raises(RefusedError, match=r"cannot travel|there is no"):
                asked[0].result(SECONDS)
        assert server.serving
        assert server.stats(timeout_seconds=SECONDS).errors == 2


class Rows(Echo):
    """Answers each call with a row of what it computed for all."""

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        table = np.repeat(np.arange(len(calls), dtype=np.uint8)[:, None], 100_000, axis=1)
        self.table = weakref.ref(table)
        return [Reply(EchoReply(text="", batch=1), {"x": row}) for row in table]


def test_a_reply_that_is_kept_does_not_keep_the_whole_batch(tmp_path: Path) -> None:
    """Replies are kept up to a limit in bytes; that of a call among 64 others held 64 times what was counted."""
    service = Rows(context(tmp_path))
    tickets = [
        Ticket(ClientId("rank-0", 1), number, "echo", "", cost=1, expires=SECONDS, payload=Call(EchoArgs(text="x")))
        for number in (1, 2)
    ]
    ((_, second), failed) = answer_batch(service, tickets=tickets)[0][1]
    assert not failed
    assert service.table() is None
    assert bytes(second) == bytes([1] * 100_000)


def test_a_stopped_server_leaves_no_shared_memory(tmp_path: Path) -> None:
    def arenas() -> int:
        gc.collect()
        links = (os.readlink(one.path) for one in os.scandir("/proc/self/fd") if os.path.lexists(one.path))  # noqa: PTH115
        return sum("gkr-arena" in link for link in links)

    before = arenas()
    with serving(Echo(context(tmp_path)), tmp_path) as (server, path):
        client = ServiceClient(path, service="echo", identity="rank-0")
        for _ in range(3):
            data = {"x": np.zeros(1 << 20, np.uint8)}
            client.call("echo", EchoArgs(text="x"), reply=EchoReply, tensors=data, deadline_seconds=SECONDS)
        assert arenas() > before
    client.close()
    del server
    assert arenas() == before


def test_a_message_that_is_refused_after_the_welcome_costs_a_connection_and_no_request(tmp_path: Path) -> None:
    """Whoever cancels a call may use its memory again while ZeroMQ still sends it, so its seal is wrong. All that the
    client waited for was refused, although a new connection mends it. Here a message is missing."""
    service = Gated(context(tmp_path, max_batch=1))
    with (
        serving(service, tmp_path, secret=b"s" * 32) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0", secret=b"s" * 32)) as client,
    ):
        asked: dict[str, Any] = {"reply": EchoReply, "deadline_seconds": SECONDS}
        futures = [client.submit("echo", EchoArgs(text=f"{number}"), **asked) for number in range(2)]
        assert service.began.acquire(timeout=SECONDS)
        until(server, lambda queued: queued.get("rank-0", 0) == 1)
        with client._courier._turning:
            (link,) = client._courier._links.values()
            assert link._seals is not None
            link._seals._sent += 1
        futures.append(client.submit("echo", EchoArgs(text="2"), **asked))
        service.permits.release(100)
        assert [future.result(SECONDS).body.text for future in futures] == ["0", "1", "2"]
        assert server.stats(timeout_seconds=SECONDS).violations == 1
    assert sorted(text for batch in service.batches for text in batch) == ["0", "1", "2"]


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


def test_report_24_the_whole_window_is_filled_again_after_a_stall(tmp_path: Path) -> None:
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/1372: after a pause only one slot is refilled."""
    service = Gated(context(tmp_path, max_batch=8))
    with (
        serving(service, tmp_path, queue_depth=8) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):

        def submit(number: int) -> list[Future[Reply]]:
            args = EchoArgs(text="x")
            return [client.submit("echo", args, reply=EchoReply, deadline_seconds=60) for _ in range(number)]

        futures = submit(1)
        assert service.began.acquire(timeout=SECONDS)  # the stall: the first is being computed, nothing is answered
        futures += submit(39)
        for running, waiting in ((1, 7), (7, 1), (1, 7), (7, 1)):
            until(server, lambda queued, waiting=waiting: queued.get("rank-0", 0) == waiting)
            service.permits.release()  # its answers free as many places, and all of them are taken
            assert service.began.acquire(timeout=SECONDS)
            assert len(service.batches[-1]) == running
        service.permits.release(100)
        for future in futures:
            future.result(SECONDS)


class Dead(Echo):
    """Its computing ends the thread that computes, as a crash inside a library may."""

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        raise SystemExit(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_report_21_a_replica_whose_engine_died_does_not_pass_for_alive(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/53157: the engine is dead, the endpoint answers 200. Here whoever
    asks is told; and a replica is published only after its service answered a real request (`test_hosting`)."""
    with (
        serving(Dead(context(tmp_path)), tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        assert server.stats(timeout_seconds=SECONDS).requests == 0
        future = client.submit("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=1)
        limit = time.monotonic() + SECONDS
        while server.serving:
            assert time.monotonic() < limit
        with pytest.raises(RuntimeError, match="not serving"):
            server.stats(timeout_seconds=SECONDS)
        with pytest.raises(UnreachableError):
            future.result(SECONDS)


class Fickle(Echo):
    """Quick until it is told to take long."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.began, self.go_on = threading.Event(), threading.Event()

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        if any(call.args.text == "long" for call in calls):
            self.began.set()
            assert self.go_on.wait(SECONDS)
        return super().compute(method, calls)


def test_report_22_a_replica_that_computes_for_long_tells_so_instead_of_looking_dead(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/issues/22511: no replies for 20 s, declared unhealthy. Here the counters
    are told even while the I/O thread computes, which it does for batches that were quick so far; and the connection
    is kept alive by ZeroMQ's own thread."""
    service = Fickle(context(tmp_path, max_batch=1))
    with (
        serving(service, tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        for _ in range(50):  # quick ones, so that the next is computed by the I/O thread
            client.call("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=SECONDS)
        future = client.submit("echo", EchoArgs(text="long"), reply=EchoReply, deadline_seconds=SECONDS)
        assert service.began.wait(SECONDS)
        assert server.stats(timeout_seconds=SECONDS).requests == 50
        assert server.stats(timeout_seconds=SECONDS).computing_seconds > 0
        service.go_on.set()
        assert future.result(SECONDS).body.text == "long"
        assert server.stats(timeout_seconds=SECONDS).computing_seconds == 0


@pytest.mark.parametrize("bytes_", [10, 10_000, 1_000_000])
def test_sealed_replicas_serve_those_of_their_run(tmp_path: Path, bytes_: int) -> None:
    """Inline and in shared memory."""
    data = np.arange(bytes_, dtype=np.uint8)
    with (
        serving(Echo(context(tmp_path)), tmp_path, secret=b"s" * 32) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0", secret=b"s" * 32)) as client,
    ):
        for _ in range(3):
            reply = client.call(
                "echo", EchoArgs(text="x"), reply=EchoReply, tensors={"x": data}, deadline_seconds=SECONDS
            )
            np.testing.assert_array_equal(reply.tensors["x"], data)
        assert server.stats(timeout_seconds=SECONDS).violations == 0


class Painter(Echo):
    """Computes its tensors where its caller sees them, and keeps them."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.kept: list[np.ndarray] = []

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        for call in calls:
            image = call.empty(300, 400, dtype=np.float32)
            image[:] = len(self.kept)
            self.kept.append(image)
        return [Reply(EchoReply(text="", batch=1), {"x": one}) for one in self.kept[-len(calls) :]]


@pytest.mark.parametrize("secret", [b"", b"s" * 32])
def test_what_a_service_computes_in_place_is_sent_without_a_copy(tmp_path: Path, secret: bytes) -> None:
    service = Painter(context(tmp_path))
    with (
        serving(service, tmp_path, secret=secret) as (_, path),
        closing(ServiceClient(path, service="echo", identity="rank-0", secret=secret)) as client,
    ):
        asked: dict[str, Any] = {"reply": EchoReply, "deadline_seconds": SECONDS}
        replies = [client.call("echo", EchoArgs(text="x"), **asked).tensors["x"] for _ in range(3)]
        assert [one[7, 7] for one in replies] == [0, 1, 2]
        for one in service.kept:
            one[7, 7] = 9
        # The first travels as a frame and brings the arena; with the others both sides have the same bytes.
        assert [one[7, 7] for one in replies] == [0, 9, 9]


def test_a_service_without_a_socket_computes_into_memory_of_its_own(tmp_path: Path) -> None:
    reply = LocalClient(Painter(context(tmp_path))).call(
        "echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=SECONDS
    )
    assert reply.tensors["x"].shape == (300, 400)
    assert reply.tensors["x"].dtype == np.float32


def test_large_replies_are_let_go_of_without_the_collector(tmp_path: Path) -> None:
    """A cycle through the future kept each reply until the collector ran, so arenas ran full and tensors were copied
    through the socket: at 16 MB a quarter of the speed."""
    data = np.zeros(1 << 20, np.uint8)
    with (
        serving(Echo(context(tmp_path)), tmp_path) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        gc.disable()
        try:
            for _ in range(20):
                client.call("echo", EchoArgs(text="x"), reply=EchoReply, tensors={"x": data}, deadline_seconds=SECONDS)
            (lane,) = server._lanes.values()
            assert lane.regions <= 1
        finally:
            gc.enable()


def test_an_idle_replica_holds_nothing_of_what_it_was_sent(tmp_path: Path) -> None:
    """The last batch stayed in its senders' shared memory until there was another one."""
    data = {"x": np.zeros(1 << 20, np.uint8)}
    with (
        serving(Painter(context(tmp_path)), tmp_path) as (_, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        for _ in range(3):
            client.call("echo", EchoArgs(text="x"), reply=EchoReply, tensors=data, deadline_seconds=SECONDS)
        limit = time.monotonic() + SECONDS
        while any(link.lane.regions for link in client._courier._links.values()):
            assert time.monotonic() < limit


def test_a_client_without_the_token_is_told_what_it_lacks(tmp_path: Path) -> None:
    with (
        serving(Echo(context(tmp_path)), tmp_path, secret=b"s" * 32) as (_, path),
        closing(ServiceClient(path, service="echo", identity="rank-0", secret=b"")) as client,
        pytest.raises(RefusedError, match="no token of that run"),
    ):
        client.call("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=SECONDS)


def test_a_client_with_another_runs_token_gets_nothing_and_learns_why(tmp_path: Path) -> None:
    with (
        serving(Echo(context(tmp_path)), tmp_path, secret=b"s" * 32) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0", secret=b"o" * 32)) as client,
    ):
        with pytest.raises(UnreachableError, match="of another run"):
            client.call("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=0.5)
        assert server.stats(timeout_seconds=SECONDS).requests == 0


def test_messages_that_were_changed_on_their_way_are_counted_and_end_the_connection(tmp_path: Path) -> None:
    with serving(Echo(context(tmp_path)), tmp_path, secret=b"s" * 32) as (server, _):
        peer = Peer(server.endpoint)
        with closing(peer):
            nonce = new_nonce()
            peer.send(*pack(Header(kind=Kind.HELLO, identity="rank-0", incarnation=1, service="echo", nonce=nonce)))
            seals = accept_challenge(b"s" * 32, peer.receive_raw(), nonce=nonce)
            hello = seals.close(pack(Header(kind=Kind.HELLO, identity="rank-0", incarnation=1, service="echo")))
            peer.send(*hello)
            assert unpack(seals.open(peer.receive_raw())).header.kind is Kind.WELCOME
            for _ in range(3):
                peer.send(*hello)  # once more: recorded and played again
            while unpack(seals.open(peer.receive_raw())).header.kind is not Kind.GOAWAY:
                pass
        assert server.stats(timeout_seconds=SECONDS).banned == 1


@pytest.mark.parametrize("bind", ["tcp://*:*", "tcp://0.0.0.0:0", "tcp://[::]:*"])
def test_no_replica_listens_everywhere_without_a_token(tmp_path: Path, bind: str) -> None:
    with pytest.raises(ConfigError, match="open to everybody"):
        Server(Echo(context(tmp_path)), queue_depth=1, bind=bind).start()


def test_large_requests_beyond_the_credit_in_bytes_wait_at_the_client(tmp_path: Path) -> None:
    """S3: what a replica holds of a rank stays within the grant, one request of any size apart."""
    service = Gated(context(tmp_path, max_batch=1))
    data = {"x": np.zeros(100_000, np.uint8)}
    with (
        serving(service, tmp_path, queue_depth=8, queue_bytes=250_000) as (server, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
    ):
        futures = [
            client.submit("echo", EchoArgs(text="x"), reply=EchoReply, tensors=data, deadline_seconds=60)
            for _ in range(10)
        ]
        seen = 0
        for _ in futures:
            assert service.began.acquire(timeout=SECONDS)
            seen = max(seen, server.stats(timeout_seconds=SECONDS).queued_bytes)
            service.permits.release()
        for future in futures:
            future.result(SECONDS)
        assert server.stats(timeout_seconds=SECONDS).violations == 0
    assert 100_000 <= seen <= 250_000


def until_cancelled(server: Server) -> None:
    limit = time.monotonic() + SECONDS
    while not server.stats(timeout_seconds=SECONDS).cancelled:
        assert time.monotonic() < limit


def test_an_asyncio_program_asks_many_at_once_and_cancelling_a_task_frees_its_place(tmp_path: Path) -> None:
    service = Gated(context(tmp_path, max_batch=1))

    async def use(path: Path, server: Server) -> list[str]:
        async with AsyncServiceClient(ServiceClient(path, service="echo", identity="rank-0")) as client:

            async def ask(text: str) -> str:
                reply = await client.call("echo", EchoArgs(text=text), reply=EchoReply, deadline_seconds=SECONDS)
                return str(reply.body.text)

            tasks = [asyncio.create_task(ask(f"{number}")) for number in range(4)]
            assert await asyncio.to_thread(service.began.acquire, timeout=SECONDS)
            await asyncio.to_thread(until, server, lambda queued: queued.get("rank-0", 0) == 1)
            tasks[1].cancel()
            await asyncio.to_thread(until_cancelled, server)
            service.permits.release(100)
            found = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(RefusedError, match="the text is 'refuse'"):
                await ask("refuse")
            return [str(one) if isinstance(one, str) else type(one).__name__ for one in found]

    with serving(service, tmp_path, queue_depth=2) as (server, path):
        assert asyncio.run(use(path, server)) == ["0", "CancelledError", "2", "3"]
        assert server.stats(timeout_seconds=SECONDS).cancelled == 1


@pytest.mark.parametrize("way", ["waiting", "awaiting"])
def test_a_client_whose_own_io_hangs_is_told_from_a_late_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("services.client.GRACE_SECONDS", 0.2)
    monkeypatch.setattr("services.aio.GRACE_SECONDS", 0.2)
    asked: dict[str, Any] = {"reply": EchoReply, "deadline_seconds": 0.1}
    with (
        serving(Echo(context(tmp_path)), tmp_path) as (_, path),
        closing(ServiceClient(path, service="echo", identity="rank-0")) as client,
        client._courier._turning,
    ):
        ask = {
            "waiting": lambda: client.call("echo", EchoArgs(text="x"), **asked),
            "awaiting": lambda: asyncio.run(AsyncServiceClient(client).call("echo", EchoArgs(text="x"), **asked)),
        }[way]
        with pytest.raises(UnreachableError, match="does not react"):
            ask()
