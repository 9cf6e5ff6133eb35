"""The learner's way to the syncer over links that are cut, slow or gone for a while. The server is the real one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from gkr.sync_keys import write_keys
from spec.errors import UnreachableError
from spec.sync import SyncConfig
from tests.builders.sync_world import DEADLINE, Server, make_plan, together, wait_until
from tests.unit.training.sync.conftest import Serve
from training.sync import carrier
from training.sync.chunks import CHUNK_BYTES
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout
from training.sync.messages import Contribution, PartReceipt

BIG = Layout.from_shapes({"w": [3, 1_000_000]})
BODY = 2 * 4 * BIG.total
"""Three chunks with the averaged weights."""
MEDIUM = Layout.from_shapes({"w": [40_000]})
Connect = Callable[..., SyncClient]


class Cutter:
    """A link to one port of the syncer that counts its bytes, and cuts connections after so many of one direction."""

    def __init__(self, target: str, *, direction: Literal["up", "down"] = "up") -> None:
        self._target, self._direction = target, direction
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes = {"up": 0, "down": 0}
        self.cuts: list[int] = []
        """For the next connections, in the order in which they are made."""
        self.connections = 0
        self._near: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for one in (self._listener, *self._near):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._near.append(near)
            self.connections += 1
            limit = self.cuts.pop(0) if self.cuts else None
            self._threads.append(threading.Thread(target=self._carry, args=(near, limit), daemon=True))
            self._threads[-1].start()

    def _carry(self, near: socket.socket, limit: int | None) -> None:
        host, _, port = self._target.rpartition(":")
        with near:
            try:
                far = socket.create_connection((host, int(port)), timeout=DEADLINE)
            except OSError:
                return
            with far:
                down = threading.Thread(target=self._pump, args=(far, near, "down", limit), daemon=True)
                down.start()
                self._pump(near, far, "up", limit)
                down.join(DEADLINE)

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str, limit: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if direction == self._direction and limit is not None and passed + len(data) > limit:
                    break
                sink.sendall(data)
                passed += len(data)
                self.bytes[direction] += len(data)
        except OSError:
            pass
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients and closes them afterwards."""
    clients: list[SyncClient] = []

    def make(server: Server, name: str = "east", *, layout: Layout = BIG, bulk: str = "", **given: float) -> SyncClient:
        clients.append(
            SyncClient(
                server.control,
                bulk=bulk or server.bulk,
                run=server.plan.run,
                learner=name,
                layout=layout,
                keys=server.keys_of(name),
                slice_seconds=0.5,
                check_seconds=0.1,
                **{"barrier_timeout_seconds": DEADLINE, "heartbeat_seconds": 0.1, "connections": 3, **given},  # type: ignore[arg-type]
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def server(tmp_path: Path, serve: Serve) -> Server:
    """One learner that has a big model; the syncer has keys."""
    config = SyncConfig.model_validate({"lease": "60s", "heartbeat": "100ms"})
    plan = make_plan(tmp_path, learners=["east"], config=config)
    write_keys(tmp_path / "keys", plan=plan)
    return serve(plan)


@pytest.fixture
def cutter(server: Server) -> Iterator[Cutter]:
    one = Cutter(server.bulk)
    yield one
    one.close()


def values(layout: Layout, *, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(layout.total).astype(np.float32)


def seed(server: Server, client: SyncClient, layout: Layout) -> int:
    found = client.register(contract_hash(server.plan), world_size=1)
    client.put_seed(values(layout), generation=found.generation, ema=values(layout))
    return found.generation


def contribution(layout: Layout, receipt: PartReceipt, *, generation: int) -> Contribution:
    return Contribution(
        learner="east", generation=generation, seq=1, base_version=0, steps=1, samples=40, cursor=40,
        parts=[receipt], fingerprint=layout.fingerprint,
    )  # fmt: skip


def test_large_bodies_go_in_chunks_and_come_back_whole(server: Server, connect: Connect) -> None:
    assert BODY > 2 * CHUNK_BYTES
    client = connect(server)
    generation = seed(server, client, BIG)
    assert client.fetch(0).tobytes() == values(BIG).tobytes()
    some = [(5, 10), (100_000, 2_500_000), (2_999_999, 1)]
    expected = np.concatenate([values(BIG)[start : start + length] for start, length in some])
    assert client.fetch(0, ranges=some).tobytes() == expected.tobytes()
    assert client.fetch(0, ranges=[]).size == 0
    delta = values(BIG, seed=2)
    receipt = client.put_part(delta, ema=delta, ranges=BIG.whole, generation=generation, seq=1, rank=0)
    assert client.commit(contribution(BIG, receipt, generation=generation)).kind == "merged"
    outer = server.plan.syncer.config.outer_learning_rate  # type: ignore[union-attr]
    assert client.status().version == 1
    np.testing.assert_allclose(client.fetch(1)[:9], (values(BIG) + outer * 1.9 * delta)[:9], rtol=1e-5)


def test_after_a_cut_only_what_is_missing_is_sent_again(server: Server, connect: Connect, cutter: Cutter) -> None:
    generation = seed(server, connect(server), BIG)
    client = connect(server, bulk=cutter.address, connections=1)
    cutter.cuts = [CHUNK_BYTES * 5 // 2]  # in the middle of the last chunk
    delta = values(BIG, seed=2)
    receipt = client.put_part(delta, ema=delta, ranges=BIG.whole, generation=generation, seq=1, rank=0)
    assert client.commit(contribution(BIG, receipt, generation=generation)).kind == "merged"
    assert cutter.connections == 2
    assert BODY < cutter.bytes["up"] < BODY + CHUNK_BYTES, "a chunk that had arrived was sent again"


def test_after_a_cut_only_what_is_missing_is_fetched_again(server: Server, connect: Connect) -> None:
    seed(server, connect(server), BIG)
    back, size = Cutter(server.bulk, direction="down"), 4 * BIG.total
    try:
        client = connect(server, bulk=back.address, connections=1)
        back.cuts = [CHUNK_BYTES * 5 // 4]  # in the middle of the second chunk
        assert client.fetch(0).tobytes() == values(BIG).tobytes()
        assert back.connections == 2
        assert size < back.bytes["down"] < size + CHUNK_BYTES
    finally:
        back.close()


def test_a_syncer_that_dies_in_the_middle_of_an_upload_gets_it_again(
    server: Server, serve: Serve, connect: Connect, cutter: Cutter
) -> None:
    generation = seed(server, connect(server), BIG)
    client = connect(server, bulk=cutter.address, bytes_per_second=BODY)
    delta = values(BIG, seed=2)

    def die() -> None:
        wait_until(lambda: cutter.bytes["up"] > CHUNK_BYTES)
        server.kill()
        serve(again=server)

    receipt, _ = together(
        lambda: client.put_part(delta, ema=delta, ranges=BIG.whole, generation=generation, seq=1, rank=0), die
    )
    assert isinstance(receipt, PartReceipt)
    assert client.commit(contribution(BIG, receipt, generation=generation)).kind == "merged"


def test_a_body_that_does_not_get_through_in_time_is_said(server: Server, connect: Connect, cutter: Cutter) -> None:
    generation = seed(server, connect(server), BIG)
    client = connect(server, bulk=cutter.address, connections=1, barrier_timeout_seconds=0.5)
    cutter.cuts = [100_000] * 1000
    delta = values(BIG, seed=2)
    with pytest.raises(UnreachableError, match=r"did not answer chunks/|chunks are missing"):
        client.put_part(delta, ema=delta, ranges=BIG.whole, generation=generation, seq=1, rank=0)


def test_whoever_finds_all_connections_busy_to_the_end_says_so(
    server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is sent again and again to a syncer that is away holds the only one."""
    monkeypatch.setattr(carrier, "_SILENCE_SECONDS", 0.2)
    client = connect(server, connections=1, layout=MEDIUM, barrier_timeout_seconds=600)
    generation = client.register(contract_hash(server.plan), world_size=1).generation
    server.kill()
    values = np.ones(MEDIUM.total, np.float32)

    def send() -> None:
        with pytest.raises(UnreachableError, match="did not answer part in time"):
            client.put_part(values, ema=values, ranges=MEDIUM.whole, generation=generation, seq=1, rank=0)

    sender = threading.Thread(target=send)
    sender.start()
    bulk = client._bulk  # pyright: ignore[reportPrivateUsage]
    wait_until(lambda: bulk._idle.empty())  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(UnreachableError, match=r"all 1 connections to the syncer at .* are busy"):
        bulk.fetch(0, fragment=0, ranges=MEDIUM.whole, until=time.monotonic())
    client._closed.set()  # pyright: ignore[reportPrivateUsage]
    sender.join(DEADLINE)
    assert not sender.is_alive()


def test_a_link_of_one_megabit_a_second_is_not_used_beyond_it(server: Server, connect: Connect) -> None:
    rate = 1e6 / 8
    seed(server, connect(server, layout=MEDIUM), MEDIUM)
    client = connect(server, layout=MEDIUM, bytes_per_second=rate)
    generation = client.register(contract_hash(server.plan), world_size=1).generation
    delta, started = values(MEDIUM, seed=2), time.monotonic()
    receipt = client.put_part(delta, ema=delta, ranges=MEDIUM.whole, generation=generation, seq=1, rank=0)
    assert time.monotonic() - started > 0.9 * (2 * delta.nbytes - 65536) / rate
    assert client.commit(contribution(MEDIUM, receipt, generation=generation)).kind == "merged"
    fetched = time.monotonic()
    client.fetch(1)
    assert time.monotonic() - fetched > 0.9 * (delta.nbytes - 65536) / rate


def test_heartbeats_do_not_wait_for_an_upload(server: Server, connect: Connect) -> None:
    """They have a connection of their own, or a slow link would cost the learner its lease."""
    seed(server, connect(server, layout=MEDIUM), MEDIUM)
    client = connect(server, layout=MEDIUM, connections=1, bytes_per_second=1_000, barrier_timeout_seconds=600)
    generation = client.register(contract_hash(server.plan), world_size=1).generation
    delta = values(MEDIUM, seed=2)

    def send() -> None:
        with suppress(UnreachableError):  # it is given up when the client is closed
            client.put_part(delta, ema=delta, ranges=MEDIUM.whole, generation=generation, seq=1, rank=0)

    sender = threading.Thread(target=send)
    sender.start()
    wait_until(client._bulk._idle.empty)  # pyright: ignore[reportPrivateUsage]
    for step in (1, 2, 3):
        client.report(step, pending_samples=0, kept_samples=0, step_seconds=0.5)
        wait_until(lambda step=step: client.status().members[0].step == step)
    assert sender.is_alive(), "the upload takes five minutes"
    assert [one.state for one in client.status().members] == ["active"]
    assert not client.fenced
    client.close()
    sender.join(DEADLINE)
    assert not sender.is_alive()


def test_a_learner_that_is_done_does_not_fail_because_the_syncer_ended_before_its_answer_came(
    server: Server, connect: Connect
) -> None:
    """The syncer ends when the last one has left."""
    client = connect(server, barrier_timeout_seconds=2.0)
    generation = client.register(contract_hash(server.plan), world_size=1).generation
    assert client.leave(generation)
    server.kill()
    assert not client.leave(generation)


def test_heartbeats_bring_news_back(server: Server, connect: Connect) -> None:
    client = connect(server, layout=MEDIUM)
    assert client.heard is None
    seed(server, client, MEDIUM)
    client.report(
        7, pending_samples=3, kept_samples=9, step_seconds=0.5, blocked_seconds={"apply": 1.5}, in_flight_steps=2
    )
    wait_until(lambda: client.heard is not None and client.heard.version == 0)
    wait_until(lambda: client.status().members[0].step == 7)


def test_a_learner_says_at_once_what_cannot_wait_for_the_next_heartbeat(server: Server, connect: Connect) -> None:
    client = connect(server, layout=MEDIUM, heartbeat_seconds=60)
    seed(server, client, MEDIUM)
    wait_until(lambda: client.heard is not None)
    assert server.plan.syncer is not None
    client.report(7, pending_samples=9, kept_samples=9, step_seconds=0.5)
    assert client.told == 0
    client.beat_soon()
    wait_until(lambda: client.told == 9)
    assert client.heard is not None
    assert client.heard.remaining == server.plan.syncer.target_samples - 9
