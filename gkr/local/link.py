"""The link between one learner and the syncer: `python -m gkr.local.link`, a process that carries bytes slowly.

Stands in for a wide-area link on a machine that has none. It knows nothing of what it carries. What it promises, per
direction: every byte arrives in order, not before the one-way delay; all connections together stay below the rate,
taking turns by segments; a new connection first pays a round trip, as a handshake would; in a partition every
connection is reset and new ones are refused.

Loss is modelled by its main effect on TCP: a segment that holds a lost packet, and all behind it on its connection,
arrive later by a retransmission, which takes a round trip but at least `RETRANSMISSION_SECONDS`. That a sender also
halves its window is not modelled, so at a loss of several percent a real link is slower. One process in Python carries
at best a hundred megabytes per second (63 measured on two busy cores); a rate above that is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spec.link import LinkConfig
from spec.plan import Plan

RETRANSMISSION_SECONDS = 0.2
"""The shortest retransmission timeout of common TCP implementations."""
PACKET_BYTES = 1448
_LARGEST_SEGMENT = 256 * 1024
_SEGMENT_SECONDS = 0.005
"""A segment takes about this long at the link's rate, so that connections that share it take short turns."""
_LEAST_IN_FLIGHT = 4 * 2**20
_CONNECT_SECONDS = 5.0
_BURST_SECONDS = 0.02
_LISTEN_RETRY_SECONDS = 0.1


@dataclass(frozen=True)
class Moments:
    """The times of the link, on the monotonic clock."""

    config: LinkConfig
    started: float

    def change(self, now: float) -> tuple[bool, float | None]:
        """Whether the link is down, and when that may change next."""
        spans = [(self.started + one.after, self.started + one.after + one.lasts) for one in self.config.partitions]
        down = any(start <= now < end for start, end in spans)
        following = [moment for span in spans for moment in span if moment > now]
        return down, min(following, default=None)


class Bucket:
    """Bytes per second over all connections of one direction; first come, first served."""

    def __init__(self, rate_bits: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = None if rate_bits is None else rate_bits / 8
        self._clock = clock
        self._free_at = float("-inf")

    def take(self, count: int) -> float:
        """Book so many bytes; when they have left, as seconds from now."""
        if self._rate is None:
            return 0.0
        now = self._clock()
        self._free_at = max(self._free_at, now - _BURST_SECONDS) + count / self._rate
        return max(0.0, self._free_at - now)


def segment_bytes(config: LinkConfig) -> int:
    """The piece in which bytes are carried."""
    if config.rate is None:
        return _LARGEST_SEGMENT
    return int(min(_LARGEST_SEGMENT, max(PACKET_BYTES, config.rate / 8 * _SEGMENT_SECONDS)))


def retransmission_seconds(config: LinkConfig, *, count: int, chance: Callable[[], float]) -> float:
    """How much later a segment of `count` bytes arrives because one of its packets was lost; mostly 0."""
    packets = -(-count // PACKET_BYTES)
    if not config.loss or chance() >= 1 - (1 - config.loss) ** packets:
        return 0.0
    return max(RETRANSMISSION_SECONDS, 2 * config.delay)


class Pipe:
    """One direction of one connection."""

    def __init__(self, config: LinkConfig, *, bucket: Bucket, first_wait: float) -> None:
        self._config, self._bucket = config, bucket
        self._segment = segment_bytes(config)
        most = max(_LEAST_IN_FLIGHT, int((config.rate or 0) / 8 * 4 * config.delay))
        self._flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(most // self._segment)
        self._due = time.monotonic() + first_wait

    async def run(self, source: socket.socket, sink: socket.socket) -> None:
        """Until the source has ended and all is delivered; then the sink is told the end."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(source))
            group.create_task(self._deliver(sink))

    async def _receive(self, source: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, self._segment):
            await asyncio.sleep(self._bucket.take(len(data)))
            late = retransmission_seconds(self._config, count=len(data), chance=random.random)
            await self._send(data, late=late)
        await self._send(b"", late=0.0)

    async def _send(self, data: bytes, *, late: float) -> None:
        self._due = max(self._due, time.monotonic() + self._config.delay + late)
        await self._flying.put((self._due, data))

    async def _deliver(self, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self._flying.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not data:
                with suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, data)


class Link:
    """Everything between one learner and the syncer: some ports, two buckets, the partitions."""

    def __init__(self, config: LinkConfig, *, started: float) -> None:
        self._config, self._moments = config, Moments(config, started)
        self._up, self._down = Bucket(config.rate), Bucket(config.rate)
        self._connections: set[asyncio.Task[None]] = set()
        self._cut = False

    async def serve(self, ports: list[tuple[socket.socket, tuple[str, int]]]) -> None:
        """Carry whatever connects to the listening sockets to the address beside each; until cancelled."""
        self._cut, _ = self._moments.change(time.monotonic())
        async with asyncio.TaskGroup() as group:
            for listener, target in ports:
                listener.setblocking(False)  # noqa: FBT003 the socket module's own signature
                group.create_task(self._accept(listener, target))
            group.create_task(self._watch_partitions())

    async def _watch_partitions(self) -> None:
        while True:
            self._cut, following = self._moments.change(time.monotonic())
            if self._cut:
                for one in self._connections:
                    one.cancel()
            if following is None:
                return
            await asyncio.sleep(max(0.0, following - time.monotonic()))

    async def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(listener)
                far = socket.socket()
            except OSError as error:  # too many open files: those that wait keep waiting
                _log(f"cannot accept: {error}")
                await asyncio.sleep(_LISTEN_RETRY_SECONDS)
                continue
            if self._cut:
                _reset(near)
                far.close()
                continue
            task = loop.create_task(self._connect(near, far, target))
            self._connections.add(task)
            # Not in the task itself: one that is cancelled before its first step runs no line of its own.
            task.add_done_callback(functools.partial(self._forget, near, far))

    def _forget(self, near: socket.socket, far: socket.socket, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        for one in (near, far):
            _reset(one)

    async def _connect(self, near: socket.socket, far: socket.socket, target: tuple[str, int]) -> None:
        """Carry one connection, and close it if it comes to an orderly end."""
        try:
            for one in (near, far):
                one.setblocking(False)  # noqa: FBT003 the socket module's own signature
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(far, target), _CONNECT_SECONDS)
            # A handshake takes a round trip before the first byte can leave.
            up = Pipe(self._config, bucket=self._up, first_wait=3 * self._config.delay)
            down = Pipe(self._config, bucket=self._down, first_wait=0.0)
            async with asyncio.TaskGroup() as group:
                group.create_task(up.run(near, far))
                group.create_task(down.run(far, near))
            near.close()
            far.close()
        except* (OSError, TimeoutError):
            pass  # one side broke the connection or is not there: the other will see the same


def _reset(connection: socket.socket) -> None:
    """Close so that the peer sees a reset, not an orderly end; nothing if it is closed."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201 stdout is the link's log file


def main(arguments: list[str] | None = None) -> int:
    """The process's entry; listening sockets are inherited, so that a restart keeps ports and waiting connections."""
    parser = argparse.ArgumentParser(prog="gkr.local.link", description="Carry bytes between a learner and the syncer.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--learner", required=True)
    parser.add_argument("--started", type=float, required=True, help="monotonic time from which partitions count")
    parser.add_argument("--port", nargs=2, action="append", required=True, metavar=("FD", "HOST:PORT"))
    given = parser.parse_args(arguments)
    config = Plan.read_json(given.plan.read_bytes()).learner(given.learner).link
    assert config is not None, f"the plan gives learner {given.learner} no link"
    ports: list[tuple[socket.socket, tuple[str, int]]] = []
    for descriptor, target in given.port:
        host, _, port = target.rpartition(":")
        ports.append((socket.socket(fileno=int(descriptor)), (host, int(port))))
    _log(f"link of {given.learner}: {config.model_dump_json()}")
    asyncio.run(Link(config, started=given.started).serve(ports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
