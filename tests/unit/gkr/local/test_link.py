"""The simulated link, over real sockets: what it delays, limits, loses and cuts.

Only what a slow machine cannot break is asserted: never too early, never too fast, and ratios of two links.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest

from gkr.local.link import (
    PACKET_BYTES,
    RETRANSMISSION_SECONDS,
    Bucket,
    Link,
    Moments,
    retransmission_seconds,
    segment_bytes,
)
from spec.link import LinkConfig

DEADLINE_SECONDS = 30.0
Port = tuple[str, int]


def link(**fields: object) -> LinkConfig:
    return LinkConfig.model_validate(fields)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE_SECONDS))


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a body that has ended with its length."""
    length = 0
    while data := await reader.read(65536):
        length += len(data)
    writer.write(f"{length}".encode())
    writer.close()


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[object, object, None]]


@asynccontextmanager
async def linked(config: LinkConfig, *answers: Answer, started: float | None = None) -> AsyncGenerator[list[Port]]:
    """Ports of a link whose far ends are servers with these answers."""
    servers = [await asyncio.start_server(one, "127.0.0.1", 0) for one in answers]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in answers]
    targets: list[Port] = [server.sockets[0].getsockname()[:2] for server in servers]
    one = Link(config, started=time.monotonic() if started is None else started)
    task = asyncio.create_task(one.serve(list(zip(listeners, targets, strict=True))))
    try:
        yield [listener.getsockname()[:2] for listener in listeners]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for server in servers:
            server.close()
        for listener in listeners:
            listener.close()


async def send(port: Port, data: bytes) -> bytes:
    """Send all, end, and read the whole answer."""
    reader, writer = await asyncio.open_connection(*port)
    writer.write(data)
    await writer.drain()
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


async def seconds_of(work: Coroutine[object, object, bytes]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


def test_a_round_trip_takes_twice_the_delay_and_a_new_connection_one_round_trip_more() -> None:
    async def test() -> None:
        async with linked(link(delay="60ms"), echo) as (port,):
            reader, writer = await asyncio.open_connection(*port)
            began = time.monotonic()
            for expected in (4, 2, 2):
                writer.write(b"ping")
                assert await reader.readexactly(4) == b"ping"
                now = time.monotonic()
                assert now - began >= expected * 0.06
                began = now
            writer.close()

    run(test())


def test_all_connections_of_a_direction_share_the_rate_and_each_gets_its_turn() -> None:
    async def test() -> None:
        async with linked(link(rate="8Mbit"), swallow, echo) as (bulk, control):
            began = time.monotonic()
            bodies = [asyncio.create_task(send(bulk, bytes(200_000))) for _ in range(3)]
            reader, writer = await asyncio.open_connection(*control)
            writer.write(b"beat")
            assert await reader.readexactly(4) == b"beat"
            assert not any(body.done() for body in bodies), "a heartbeat overtakes the bodies that are on their way"
            assert await asyncio.gather(*bodies) == [b"200000"] * 3
            assert time.monotonic() - began >= 0.9 * 600_000 / 1e6
            writer.close()

    run(test())


def test_ten_times_the_rate_is_several_times_as_fast() -> None:
    async def test() -> None:
        took: list[float] = []
        for rate in ("4Mbit", "40Mbit"):
            async with linked(link(rate=rate), swallow) as (port,):
                took.append(await seconds_of(send(port, bytes(400_000))))
        assert took[0] > 3 * took[1]

    run(test())


def test_the_delay_does_not_limit_the_rate() -> None:
    """Bytes in flight are as many as rate and delay ask for; a window of one segment would take two minutes here."""

    async def test() -> None:
        async with linked(link(delay="100ms", rate="80Mbit"), swallow) as (port,):
            assert await send(port, bytes(8_000_000)) == b"8000000"

    run(test())


def test_what_is_carried_arrives_whole_and_in_order_through_losses() -> None:
    async def test() -> None:
        data = bytes(range(256)) * 4_000
        async with linked(link(rate="200Mbit", loss="0.1%", delay="1ms"), echo) as (port,):
            assert await send(port, data) == data

    run(test())


def test_a_partition_resets_connections_refuses_new_ones_and_ends() -> None:
    async def test() -> None:
        long = link(partitions=[{"after": "0s", "lasts": "1h"}])
        async with linked(long, echo) as (port,):
            with pytest.raises(ConnectionError):
                assert await send(port, b"hello") == b"hello"
        cut = link(partitions=[{"after": "10s", "lasts": "1s"}])
        async with linked(cut, echo, started=time.monotonic() - 9.7) as (port,):
            reader, writer = await asyncio.open_connection(*port)
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            with pytest.raises(ConnectionError):
                assert await reader.read() == b"no end without a reset"
            writer.close()
        async with linked(cut, echo, started=time.monotonic() - 11.1) as (port,):
            assert await send(port, b"hello") == b"hello"

    run(test())


def test_a_syncer_that_is_not_there_is_a_reset() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            nobody = taken.getsockname()[:2]
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(Link(link(), started=0.0).serve([(listener, nobody)]))
        with pytest.raises(ConnectionError):
            assert await send(listener.getsockname()[:2], b"hello") == b"hello"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listener.close()

    run(test())


def test_a_bucket_books_what_was_sent_and_saves_nothing_up() -> None:
    now = [0.0]
    bucket = Bucket(8_000, clock=lambda: now[0])
    assert bucket.take(1_000) == pytest.approx(0.98)
    assert bucket.take(1_000) == pytest.approx(1.98)
    now[0] = 100.0
    assert bucket.take(1_000) == pytest.approx(0.98)
    assert Bucket(None).take(10**12) == 0.0


def test_the_times_of_a_link_are_its_partitions() -> None:
    config = link(partitions=[{"after": "10s", "lasts": "5s"}, {"after": "12s", "lasts": "8s"}])
    moments = Moments(config, started=100.0)
    want = {100.0: (False, 110.0), 110.0: (True, 112.0), 115.0: (True, 120.0), 120.0: (False, None)}
    assert {now: moments.change(now) for now in want} == want


@pytest.mark.parametrize(
    ("delay", "chance", "want"), [("10ms", 0.0, RETRANSMISSION_SECONDS), ("1s", 0.0, 2.0), ("10ms", 0.999, 0.0)]
)
def test_a_lost_packet_costs_a_round_trip_but_at_least_the_timeout(delay: str, chance: float, want: float) -> None:
    assert retransmission_seconds(link(delay=delay, loss="1%"), count=1, chance=lambda: chance) == want


def test_a_longer_segment_is_hit_more_often() -> None:
    config = link(loss="1%")
    assert retransmission_seconds(config, count=PACKET_BYTES, chance=lambda: 0.02) == 0.0
    assert retransmission_seconds(config, count=3 * PACKET_BYTES, chance=lambda: 0.02) > 0.0


def test_segments_are_short_turns_but_never_shorter_than_a_packet() -> None:
    assert segment_bytes(link(rate="10kbit")) == PACKET_BYTES
    assert segment_bytes(link(rate="8Mbit")) == 5_000
    assert segment_bytes(link(rate="100Gbit")) == segment_bytes(link())
