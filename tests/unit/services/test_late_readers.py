"""Clients that read late: behind a network that stands still for a while, or because they do something else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from services.client import ServiceClient
from services.server import Server
from services.service import Call, Reply
from services.wire.frames import Kind
from spec.errors import GkrError
from tests.builders.echo import Echo, EchoArgs, EchoReply, context
from tests.unit.services.test_client import publish
from tests.unit.services.test_server import Peer

SECONDS = 20.0
MIB = 1 << 20


class Large(Echo):
    """Answers a megabyte to whatever it is asked."""

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        size = len(calls)
        return [Reply(EchoReply(text=call.args.text, batch=size), {"x": np.ones(MIB, np.uint8)}) for call in calls]


@contextmanager
def network(port: int, *, flows: threading.Event) -> Generator[int]:
    """A port before that one, through which nothing comes back unless it `flows`."""

    opened: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def carry(source: socket.socket, sink: socket.socket, *, may: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):  # either side has gone
            while data := source.recv(1 << 16):
                may()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def begin(target: Callable[..., None], **given: object) -> None:
        threads.append(threading.Thread(target=target, kwargs=given, daemon=True))
        threads[-1].start()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed below
            while True:
                near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                opened.extend((near, far))
                begin(carry, source=near, sink=far, may=bool)
                begin(carry, source=far, sink=near, may=lambda: flows.wait(SECONDS))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        begin(accept)
        yield listener.getsockname()[1]
        flows.set()
        for one in (listener, *opened):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(SECONDS)
        for one in opened:
            one.close()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit


def test_a_client_within_its_grant_is_not_forgotten_while_the_network_stands_still(tmp_path: Path) -> None:
    """The mark of a socket was the grant and some: ZeroMQ counts by halves of it what the other side has taken, so half
    a window was too much for it as soon as replies were large. The client was forgotten and never told, and all its
    requests waited for their deadlines."""
    path, flows = tmp_path / "directory.json", threading.Event()
    asked: dict[str, object] = {"reply": EchoReply, "deadline_seconds": SECONDS}
    with (
        Server(Large(context(tmp_path, max_batch=32)), queue_depth=32, incarnation=1) as server,
        network(int(server.endpoint.rpartition(":")[2]), flows=flows) as port,
    ):
        publish(path, (1, f"tcp://localhost:{port}"), epoch=1)  # a name, so that tensors travel as frames
        with closing(ServiceClient(path, service="echo", identity="rank-0")) as client:
            for window in range(4):
                flows.set()
                client.call("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=SECONDS)
                flows.clear()
                futures = [client.submit("echo", EchoArgs(text=f"{n}"), **asked) for n in range(32)]  # type: ignore[arg-type]
                until(lambda all_=33 * (window + 1): server.stats(timeout_seconds=SECONDS).requests == all_)
                assert server.stats(timeout_seconds=SECONDS).clients == 1
                flows.set()
                assert [future.result(SECONDS).body.text for future in futures] == [f"{n}" for n in range(32)]


def test_a_client_that_does_not_read_is_forgotten_and_hears_so_when_it_does(tmp_path: Path) -> None:
    """S12: what it does not read raises nobody else's times. Its pipe is full, so it could not be told when it was
    forgotten: it would have waited on this connection for ever."""
    path, late = tmp_path / "directory.json", 0
    with (
        Server(Large(context(tmp_path)), queue_depth=2, incarnation=1) as server,
        closing(ServiceClient(path, service="echo", identity="quiet")) as quiet,
        closing(Peer(server.endpoint, most_unread=1)) as peer,
    ):
        publish(path, (1, server.endpoint), epoch=1)
        quiet.call("echo", EchoArgs(text="first"), reply=EchoReply, deadline_seconds=SECONDS)
        peer.hello("rank-0")
        sent = 0
        while server.stats(timeout_seconds=SECONDS).clients == 2:
            sent += 1
            assert sent < 1000
            peer.request(sent, "x")
            began = time.monotonic()
            quiet.call("echo", EchoArgs(text="x"), reply=EchoReply, deadline_seconds=SECONDS)
            late += time.monotonic() - began > 0.5
            until(lambda all_=2 * sent + 1: server.stats(timeout_seconds=SECONDS).requests == all_)
        assert late <= sent // 50

        read = [peer.receive().header]
        while read[-1].kind is not Kind.GOAWAY:
            read.append(peer.receive().header)
        # What its pipe held came, in order; what was too much did not.
        assert [one.request for one in read[:-1]] == list(range(1, len(read)))
        assert len(read) <= sent
