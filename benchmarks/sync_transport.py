"""Claim: one core at each end carries 5 Gbit/s of a contribution, and 2.5 with TLS, with everything that the sync's
transport adds to its bytes: chunks, CRC, SHA-256 at both ends, HTTP.

A learner's process sends a part of 256 MiB to a real syncer process on loopback and fetches weights of 128 MiB from it,
over 1 and 4 connections, with and without keys. Beside it the same bytes go through bare sockets between two processes,
received into one buffer. Rounds alternate between all of them; medians count. Processor seconds per GB of both
processes are what counts: the rate on the clock, beside that of the bare sockets, needs a quiet machine with a core for
each end. Run `python -m benchmarks.sync_transport`; writes benchmarks/results/sync_transport.json.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gkr.sync_keys import write_keys
from spec.sync import SyncConfig
from tests.builders.sync_world import Server, make_plan, start_server
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout, view_bytes

LAYOUT = Layout.from_shapes({"w": [32 << 20]})
BODY = 2 * 4 * LAYOUT.total
CONNECTIONS, ROUNDS = (1, 4), 5
RESULTS = Path(__file__).parent / "results" / "sync_transport.json"


class Sender:
    """A learner of a syncer of its own, with or without keys."""

    def __init__(self, folder: Path, values: Floats, *, secure: bool) -> None:
        folder.mkdir()
        plan = make_plan(folder, learners=["east"], config=SyncConfig.model_validate({"lease": "600s"}))
        if secure:
            write_keys(folder / "keys", plan=plan)
        self.server: Server = start_server(folder, plan)
        self.values, self.seq = values, 0
        self.clients = {
            count: SyncClient(
                self.server.control, bulk=self.server.bulk, run=plan.run, learner="east", layout=LAYOUT,
                keys=self.server.keys_of("east"), connections=count,
            )
            for count in CONNECTIONS
        }  # fmt: skip
        first = self.clients[1]
        self.generation = first.register(contract_hash(plan), world_size=1).generation
        first.put_seed(values, generation=self.generation, ema=values)

    def upload(self, connections: int) -> None:
        """A part of a contribution of its own; the one before is dropped."""
        self.seq += 1
        self.clients[connections].put_part(
            self.values, ema=self.values, ranges=LAYOUT.whole, generation=self.generation, seq=self.seq, rank=0
        )

    def download(self, connections: int) -> None:
        self.clients[connections].fetch(0)

    @property
    def pid(self) -> int:
        return self.server.process.pid

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.server.terminate()


class Bare:
    """The same bytes through sockets, to another process that receives them into one buffer."""

    def __init__(self, values: Floats) -> None:
        self._view = view_bytes(values)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sync_transport", "receive"], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    @property
    def pid(self) -> int:
        return self._process.pid

    def upload(self, connections: int) -> None:
        """Both arrays, each connection its share; ends when the other side has all of it."""
        share = len(self._view) // connections
        threads = [threading.Thread(target=self._send, args=(number * share, share)) for number in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)

    def _send(self, start: int, size: int) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as connection:
            connection.sendall((2 * size).to_bytes(8, "little"))
            for _ in range(2):
                connection.sendall(self._view[start : start + size])
            assert connection.recv(1) == b"k"

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


def receive() -> None:
    """The other process: connections side by side, each into its own part of a buffer that was touched before."""
    room = np.zeros(BODY, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=take, args=(connection, room), daemon=True).start()


def take(connection: socket.socket, room: memoryview) -> None:
    with connection:
        left = int.from_bytes(connection.recv(8), "little")
        while left:
            left -= connection.recv_into(room[:left], min(left, 1 << 20))
        connection.sendall(b"k")


def main() -> None:
    """Measure, print, write; with `receive` only the bare receiver."""
    logging.disable(logging.WARNING)  # parts that are superseded are what this is about
    if sys.argv[1:] == ["receive"]:
        receive()
        return
    values = np.resize(np.random.default_rng(1).standard_normal(1 << 20, dtype=np.float32), LAYOUT.total)
    with tempfile.TemporaryDirectory() as folder:
        plain = Sender(Path(folder) / "plain", values, secure=False)
        secure = Sender(Path(folder) / "secure", values, secure=True)
        bare = Bare(values)
        try:
            rows = measure(plain, secure, bare)
        finally:
            for one in (plain, secure, bare):
                one.close()
    print(
        f"{'':10} {'connections':>11} {'MB/s':>7} {'of bare':>7} {'sender':>7} {'receiver':>8}  (s of one core per GB)"
    )
    for row in rows:
        print(
            f"{row['what']:10} {row['connections']:11d} {row['mb_per_second']:7.0f} {row['ratio']:7.2f} "
            f"{row['here_seconds_per_gb']:7.2f} {row['there_seconds_per_gb']:8.2f}"
        )
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "body": BODY, "rows": rows}, indent=1) + "\n")


@dataclass(frozen=True)
class Taken:
    """What one transfer took, per GB."""

    clock: float
    here: float
    there: float


def measure(plain: Sender, secure: Sender, bare: Bare) -> list[dict[str, Any]]:
    """Medians. A round's ratio is to the bare sockets of the same round and number of connections."""
    cases: dict[str, tuple[Sender | Bare, Callable[[int], None], int]] = {
        "bare": (bare, bare.upload, BODY),
        "upload": (plain, plain.upload, BODY),
        "upload TLS": (secure, secure.upload, BODY),
        "fetch": (plain, plain.download, BODY // 2),
        "fetch TLS": (secure, secure.download, BODY // 2),
    }
    taken: dict[tuple[str, int], list[Taken]] = {}
    for round_number in range(ROUNDS + 1):
        for count in CONNECTIONS:
            for name, (ends, act, size) in cases.items():
                one = take_time(lambda act=act, count=count: act(count), other=ends.pid, gigabytes=size / 1e9)
                if round_number:
                    taken.setdefault((name, count), []).append(one)
    return [
        {
            "what": name,
            "connections": count,
            "mb_per_second": 1e3 / statistics.median(one.clock for one in found),
            "ratio": statistics.median(
                other.clock / one.clock for one, other in zip(found, taken["bare", count], strict=True)
            ),
            "here_seconds_per_gb": statistics.median(one.here for one in found),
            "there_seconds_per_gb": statistics.median(one.there for one in found),
        }
        for (name, count), found in taken.items()
    ]


def take_time(act: Callable[[], None], *, other: int, gigabytes: float) -> Taken:
    """On the clock, and of a processor in this process and in the other."""
    before, started = psutil.Process(other).cpu_times(), time.perf_counter()
    here = time.process_time()
    act()
    clock, here = time.perf_counter() - started, time.process_time() - here
    after = psutil.Process(other).cpu_times()
    there = after.user + after.system - before.user - before.system
    return Taken(clock / gigabytes, here / gigabytes, there / gigabytes)


if __name__ == "__main__":
    main()
