"""Claim: the whole service protocol costs little more than bare ZeroMQ, and far less than a Ray call.

One run, two processes (client and server), every transport with the same payloads: the request is small, the reply is N
bytes taken from four rotating arrays, and the client touches one byte of every page it got, with `w` outstanding.
Compared: copying the bytes once (the limit), ZeroMQ DEALER and ROUTER on an ipc address with no protocol, our client
and server, and a fresh Ray with one actor.

    python -m benchmarks.services_transport [--seconds 0.8] [--trials 3] [--without-ray]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import zmq
from msgspec import Struct

from services.client import ServiceClient
from services.directory import write_directory
from services.server import Server
from services.service import Call, Method, Reply, Service, ServiceContext
from spec.errors import GkrError
from spec.services import Directory, Replica

SIZES = {"1KB": 1 << 10, "64KB": 1 << 16, "1MB": 1 << 20, "16MB": 1 << 24}
WINDOWS = (1, 4)
DEADLINE_SECONDS = 60.0
PAGE = 4096

Ask = Callable[[int, int, float], float]
"""(size, outstanding, seconds) -> replies per second."""


class Size(Struct, frozen=True, kw_only=True):
    """How many bytes are wanted."""

    size: int


class Nothing(Struct, frozen=True, kw_only=True):
    """The reply is a tensor."""


class Bytes(Service):
    """Answers with so many bytes."""

    methods: ClassVar[tuple[Method, ...]] = (Method("get", Size, Nothing),)

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._arrays = _arrays()
        self._turn = 0

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """The next array of that size."""
        answers: list[Reply | GkrError] = []
        for call in calls:
            self._turn += 1
            answers.append(Reply(Nothing(), {"data": self._arrays[call.args.size][self._turn % 4]}))
        return answers


def _arrays() -> dict[int, list[np.ndarray]]:
    return {size: [np.full(size, n, dtype=np.uint8) for n in range(4)] for size in SIZES.values()}


def _touch(data: np.ndarray) -> int:
    return int(data[::PAGE].sum(dtype=np.int64))


# --- servers, each in a process of its own


def _serve_zmq(address: str, ready: Connection) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    arrays, turn = _arrays(), 0
    ready.send("")
    while True:
        route, request = router.recv_multipart()
        size = int.from_bytes(request, "little")
        if not size:
            break
        turn += 1
        router.send_multipart([route, b"", arrays[size][turn % 4].data], copy=size < (1 << 16))
    context.destroy(linger=0)


def _serve_ours(bind: str, ready: Connection, folder: str) -> None:
    context = ServiceContext(kind="encode", name="bytes", cache_dir=Path(folder), manifest="", max_batch=4)
    with Server(Bytes(context), queue_depth=8, bind=bind) as server:
        ready.send(server.endpoint)
        ready.recv()


# --- clients


def _ask_zmq(address: str) -> tuple[Ask, Callable[[], None]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)

    def ask(size: int, window: int, seconds: float) -> float:
        request = size.to_bytes(8, "little")
        for _ in range(window):
            dealer.send(request)
        return _count(seconds, window, lambda: _touch(_receive(dealer)), lambda: dealer.send(request))

    def end() -> None:
        dealer.send((0).to_bytes(8, "little"))
        context.destroy(linger=1000)

    return ask, end


def _receive(dealer: Any) -> np.ndarray:
    frames = dealer.recv_multipart(copy=False)
    return np.frombuffer(frames[1].buffer, dtype=np.uint8)


def _ask_ours(endpoint: str, folder: Path) -> tuple[Ask, Callable[[], None]]:
    replica = Replica(service="bytes", kind="encode", index=0, endpoint=endpoint, incarnation=1, pid=0)
    write_directory(folder / "directory.json", directory=Directory(epoch=1, replicas=[replica]))
    client = ServiceClient(folder / "directory.json", service="bytes", identity="bench")

    def ask(size: int, window: int, seconds: float) -> float:
        args = Size(size=size)
        waiting: deque[Future[Reply]] = deque()

        def send() -> None:
            waiting.append(client.submit("get", args, reply=Nothing, deadline_seconds=DEADLINE_SECONDS))

        for _ in range(window):
            send()
        receive = lambda: _touch(waiting.popleft().result(DEADLINE_SECONDS).tensors["data"])  # noqa: E731
        return _count(seconds, window, receive, send)

    return ask, client.close


def _ask_ray() -> tuple[Ask, Callable[[], None]]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 31, log_to_driver=False)

    class Actor:
        def __init__(self) -> None:
            import torch

            self.arrays = {
                size: [torch.full((size,), n, dtype=torch.uint8) for n in range(4)] for size in SIZES.values()
            }
            self.turn = 0

        def get(self, size: int) -> Any:
            self.turn += 1
            return self.arrays[size][self.turn % 4]

    actor: Any = ray.remote(Actor).remote()
    ray.get(actor.get.remote(1 << 10), timeout=DEADLINE_SECONDS)

    def ask(size: int, window: int, seconds: float) -> float:
        waiting: deque[Any] = deque(actor.get.remote(size) for _ in range(window))
        receive = lambda: _touch(cast("Any", ray.get(waiting.popleft(), timeout=DEADLINE_SECONDS)).numpy())  # noqa: E731
        return _count(seconds, window, receive, lambda: waiting.append(actor.get.remote(size)))

    return ask, ray.shutdown


def _ask_memcpy() -> tuple[Ask, Callable[[], None]]:
    arrays = _arrays()
    targets = {size: np.empty(size, dtype=np.uint8) for size in SIZES.values()}

    def ask(size: int, window: int, seconds: float) -> float:
        del window
        turn = [0]

        def copy() -> int:
            turn[0] += 1
            np.copyto(targets[size], arrays[size][turn[0] % 4])
            return _touch(targets[size])

        return _count(seconds, 0, copy, lambda: None)

    return ask, lambda: None


def _count(seconds: float, window: int, receive: Callable[[], int], send: Callable[[], None]) -> float:
    """Replies per second with a constant number outstanding; what is left at the end is taken without counting."""
    began = time.perf_counter()
    until, replies = began + seconds, 0
    while True:
        receive()
        replies += 1
        now = time.perf_counter()
        if now > until:
            break
        send()
    for _ in range(window - 1):
        receive()
    return replies / (now - began)


def main() -> None:
    """Measure everything, print a row per size and window, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.8, help="of one trial")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/services_transport.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gkr-bench-") as name:
        found = _measure(Path(name), options)
    rows = {key: {transport: statistics.median(some) for transport, some in row.items()} for key, row in found.items()}
    for key, row in rows.items():
        ratios = [f"{row['ours'] / row['zmq']:.2f} of bare ZeroMQ", f"{row['ours'] / row['memcpy']:.2f} of one copy"]
        if "ray" in row:
            ratios.append(f"{row['ours'] / row['ray']:.1f} x Ray")
        print(f"services_transport: {key:>10} {row['ours']:8.0f} replies/s: {', '.join(ratios)}")
    document = {
        "name": "services_transport",
        "device": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "replies_per_second": rows,
        "trials": found,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n")


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    bare = spawn.Process(target=_serve_zmq, args=(f"ipc://{folder}/bare", there), daemon=True)
    bare.start()
    _await(here)
    mine, other = spawn.Pipe()
    ours = spawn.Process(target=_serve_ours, args=(f"ipc://{folder}/ours", other, str(folder)), daemon=True)
    ours.start()
    endpoint = _await(mine)
    transports = {"memcpy": _ask_memcpy(), "zmq": _ask_zmq(f"ipc://{folder}/bare"), "ours": _ask_ours(endpoint, folder)}
    if not options.without_ray:
        transports["ray"] = _ask_ray()
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.trials):
        for label, size in SIZES.items():
            for window in WINDOWS:
                row = found.setdefault(f"{label} w{window}", {})
                for name, (ask, _) in transports.items():  # close together in time: the machine is shared
                    row.setdefault(name, []).append(ask(size, window, options.seconds))
    for _, end in transports.values():
        end()
    mine.send("end")
    for process in (bare, ours):
        process.join(10)
    return found


def _await(pipe: Any) -> str:
    if not pipe.poll(DEADLINE_SECONDS):
        sys.exit("a server did not start")
    return str(pipe.recv())


if __name__ == "__main__":
    main()
