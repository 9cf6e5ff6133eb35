"""Claim: a rank that floods a service cannot raise a quiet rank's latency beyond one batch.

One run measures the same server twice: with our bounded queues and turns by cost, and with one first-in-first-out queue
without a bound (the shape of a ROUTER drained into one list). One client keeps 256 requests outstanding; three quiet
clients ask one thing at a time with a pause of 5 ms; each request costs 2 ms of service, one at a time.

    python -m benchmarks.service_fairness [--seconds 4]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from services.client import ServiceClient
from services.directory import write_directory
from services.reception import ClientId, Reception
from services.scheduler import Batch, Scheduler, Ticket
from services.server import Server
from services.service import Call, Method, Reply, Service, ServiceContext
from spec.errors import GkrError
from spec.services import Directory, Replica

FLOOD_OUTSTANDING = 256
QUIET_CLIENTS = 3
PAUSE_SECONDS = 0.005
SERVICE_SECONDS = 0.002
DEADLINE_SECONDS = 30.0


class Text(Struct, frozen=True, kw_only=True):
    """Both ways."""

    text: str


class Slow(Service):
    """Holds the worker for a fixed time per batch, as a device would."""

    methods: ClassVar[tuple[Method, ...]] = (Method("echo", Text, Text),)

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """Answer what was asked, later."""
        time.sleep(SERVICE_SECONDS)
        return [Reply(call.args) for call in calls]


class Fifo(Scheduler[ClientId]):
    """What ours is compared with: arrival order over all clients."""

    def __init__(self, *, grant: int, max_batch: int) -> None:
        super().__init__(grant=grant, max_batch=max_batch)
        self._arrivals: deque[Ticket[ClientId]] = deque()

    def offer(self, ticket: Ticket[ClientId]) -> None:
        """To the end of the one queue."""
        self.hold(ticket.client, ticket.request)
        self._arrivals.append(ticket)

    def next_batch(self, now: float) -> Batch[ClientId] | None:
        """The oldest request."""
        return Batch([self._arrivals.popleft()], []) if self._arrivals else None

    def ready_at(self) -> float:
        """At once, if there is one."""
        return 0.0 if self._arrivals else math.inf


class FifoReception(Reception):
    """The same protocol over that queue."""

    def __init__(self, service: Service, *, incarnation: int) -> None:
        methods = {method.name: method for method in service.methods}
        name = service.context.name
        super().__init__(methods, service=name, incarnation=incarnation, grant=FLOOD_OUTSTANDING, max_batch=1)
        self._scheduler = Fifo(grant=FLOOD_OUTSTANDING, max_batch=1)


class FifoServer(Server):
    """The same server over that queue."""

    def __init__(self, service: Service, *, queue_depth: int, incarnation: int) -> None:
        super().__init__(service, queue_depth=queue_depth, incarnation=incarnation)
        self._reception = FifoReception(service, incarnation=incarnation)


def measure(server: Server, *, folder: Path, incarnation: int, seconds: float) -> dict[str, float]:
    """Latencies of the quiet clients while the flood is up."""
    path = folder / f"directory-{incarnation}.json"
    with server:
        replica = Replica(
            service="slow", kind="encode", index=0, endpoint=server.endpoint, incarnation=incarnation, pid=os.getpid()
        )
        write_directory(path, directory=Directory(epoch=1, replicas=[replica]))
        stop = threading.Event()
        flood_client = ServiceClient(path, service="slow", identity="flood")
        flood_up = threading.Event()
        flooded: list[int] = [0]
        flood = threading.Thread(target=_flood, args=(flood_client, stop, flood_up, flooded))
        flood.start()
        flood_up.wait(DEADLINE_SECONDS)
        found: list[list[float]] = [[] for _ in range(QUIET_CLIENTS)]
        clients = [ServiceClient(path, service="slow", identity=f"quiet-{n}") for n in range(QUIET_CLIENTS)]
        threads = [
            threading.Thread(target=_quiet, args=(client, stop, latencies))
            for client, latencies in zip(clients, found, strict=True)
        ]
        for thread in threads:
            thread.start()
        stop.wait(seconds)
        stop.set()
        for thread in (*threads, flood):
            thread.join(DEADLINE_SECONDS)
        for client in (*clients, flood_client):
            client.close()
    latencies = sorted(1000 * one for some in found for one in some)
    return {
        "quiet_replies": len(latencies),
        "quiet_p50_ms": latencies[len(latencies) // 2],
        "quiet_p99_ms": latencies[len(latencies) * 99 // 100],
        "quiet_max_ms": latencies[-1],
        "flood_replies": flooded[0],
    }


def _flood(client: ServiceClient, stop: threading.Event, up: threading.Event, replies: list[int]) -> None:
    """Keep FLOOD_OUTSTANDING requests outstanding."""
    places = threading.Semaphore(FLOOD_OUTSTANDING)

    def done(_future: Future[Reply]) -> None:
        replies[0] += 1
        places.release()
        if replies[0] == FLOOD_OUTSTANDING // 4:
            up.set()

    while not stop.is_set():
        if places.acquire(timeout=0.1):
            args = Text(text="flood")
            client.submit("echo", args, reply=Text, deadline_seconds=DEADLINE_SECONDS).add_done_callback(done)


def _quiet(client: ServiceClient, stop: threading.Event, latencies: list[float]) -> None:
    args = Text(text="quiet")
    client.call("echo", args, reply=Text, deadline_seconds=DEADLINE_SECONDS)  # connect
    while not stop.wait(PAUSE_SECONDS):
        began = time.perf_counter()
        client.call("echo", args, reply=Text, deadline_seconds=DEADLINE_SECONDS)
        latencies.append(time.perf_counter() - began)


def main() -> None:
    """Measure both, print the ratio, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the two measurements")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/service_fairness.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = ServiceContext(kind="encode", name="slow", cache_dir=folder, manifest="", max_batch=1)
        ours = measure(
            Server(Slow(context), queue_depth=8, incarnation=1), folder=folder, incarnation=1, seconds=options.seconds
        )
        fifo = measure(
            FifoServer(Slow(context), queue_depth=FLOOD_OUTSTANDING, incarnation=2),
            folder=folder,
            incarnation=2,
            seconds=options.seconds,
        )
    result = {
        "name": "service_fairness",
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "ours": ours,
        "single_fifo": fifo,
        "ratio_p99": fifo["quiet_p99_ms"] / ours["quiet_p99_ms"],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"service_fairness: quiet rank p99 under a flood {ours['quiet_p99_ms']:.1f} ms, "
        f"single FIFO {fifo['quiet_p99_ms']:.1f} ms, ratio {result['ratio_p99']:.0f}x"
    )


if __name__ == "__main__":
    main()
