"""Claim: the whole service protocol costs little more than bare ZeroMQ, and far less than a Ray call.

One run, client and server in two processes, every transport with the same payloads: the request is small, the reply is
N bytes taken from four rotating arrays, and the client touches one byte of every page it got, with `w` outstanding.
Compared: copying the bytes once (the limit), ZeroMQ DEALER and ROUTER on an ipc address with no protocol (and with
CURVE), and a fresh Ray with one actor that answers a torch tensor or, at 16 MB, a numpy array. Ours is measured on one
machine, with the run's token, with replies computed in place (their first bytes are written anew, so nothing is copied
but something is new), and as between two machines: TCP and no memory in common. Trials alternate; CPU is that of all
processes of a trial together.

    python -m benchmarks.services_transport [--seconds 0.5] [--trials 5] [--sizes 1KB 16MB] [--without-ray]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import psutil
import zmq
from msgspec import Struct

from benchmarks._services import DEADLINE_SECONDS, Started, started, until_told
from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from services.client import ServiceClient
from services.directory import write_directory
from services.server import Server
from services.service import Call, Method, Reply, Service, ServiceContext
from spec.errors import GkrError
from spec.services import Directory, Replica

SIZES = {"1KB": 1 << 10, "64KB": 1 << 16, "1MB": 1 << 20, "16MB": 1 << 24}
WINDOWS = (1, 4)
PAGE = 4096
SECRET = b"benchmark" * 3

Ask = Callable[[int, int, float], float]
"""(size, outstanding, seconds) -> replies per second."""
Rows = dict[str, dict[str, float]]
"""By size and window, then by transport."""


@dataclass(frozen=True)
class Transport:
    """One way to ask, and at which sizes it is asked."""

    ask: Ask
    sizes: Sequence[str]


class Size(Struct, frozen=True, kw_only=True):
    """How many bytes are wanted."""

    size: int
    in_place: bool = False


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
        return [Reply(Nothing(), {"data": self._data(call)}) for call in calls]

    def _data(self, call: Call) -> np.ndarray:
        self._turn += 1
        if not call.args.in_place:
            return self._arrays[call.args.size][self._turn % 4]
        data = call.empty(call.args.size, dtype=np.uint8)
        data[:8].view(np.uint64)[0] = self._turn
        return data


def _arrays() -> dict[int, list[np.ndarray]]:
    return {size: [np.full(size, n, dtype=np.uint8) for n in range(4)] for size in SIZES.values()}


def _touch(data: np.ndarray) -> int:
    return int(data[::PAGE].sum(dtype=np.int64))


# --- servers, each in a process of its own


def _serve_zmq(pipe: Connection, address: str, keys: tuple[bytes, bytes] | None) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    if keys is not None:
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys
    router.bind(address)
    arrays, turn = _arrays(), 0
    pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        route, request = router.recv_multipart()
        size = int.from_bytes(request, "little")
        turn += 1
        router.send_multipart([route, b"", arrays[size][turn % 4].data], copy=size < (1 << 16))


def _serve_ours(pipe: Connection, bind: str, secret: bytes) -> None:
    folder = Path(tempfile.gettempdir())
    context = ServiceContext(kind="encode", name="bytes", cache_dir=folder, manifest="", max_batch=4)
    with Server(Bytes(context), queue_depth=8, bind=bind, secret=secret) as server:
        pipe.send(server.endpoint)
        until_told(pipe)


# --- clients


def _ask_zmq(stack: ExitStack, address: str, keys: tuple[bytes, bytes] | None = None) -> Ask:
    server: Started = stack.enter_context(started(_serve_zmq, address, keys))
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    dealer = context.socket(zmq.DEALER)
    if keys is not None:
        dealer.curve_serverkey = keys[0]
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.connect(server.hear())

    def ask(size: int, window: int, seconds: float) -> float:
        request = size.to_bytes(8, "little")
        for _ in range(window):
            dealer.send(request)
        return _count(seconds, window, lambda: _touch(_receive(dealer)), lambda: dealer.send(request))

    return ask


def _receive(dealer: Any) -> np.ndarray:
    frames = dealer.recv_multipart(copy=False)
    return np.frombuffer(frames[1].buffer, dtype=np.uint8)


def _ask_ours(stack: ExitStack, bind: str, *, folder: Path, as_host: str = "", secret: bytes = b"") -> list[Ask]:
    """As it is, and with replies computed in place. `as_host`: by which name the client reaches the replica."""
    server: Started = stack.enter_context(started(_serve_ours, bind, secret))
    endpoint = server.hear()
    if as_host:
        endpoint = f"tcp://{as_host}:{endpoint.rpartition(':')[2]}"
    replica = Replica(
        service="bytes", kind="encode", index=0, endpoint=endpoint, incarnation=1, pid=0, sealed=bool(secret)
    )
    path = folder / f"{server.pid}.json"
    write_directory(path, directory=Directory(epoch=1, replicas=[replica]))
    client = ServiceClient(path, service="bytes", identity="bench", secret=secret)
    stack.callback(client.close)

    def ask(size: int, window: int, seconds: float, *, in_place: bool = False) -> float:
        args = Size(size=size, in_place=in_place)
        waiting: deque[Future[Reply]] = deque()

        def send() -> None:
            waiting.append(client.submit("get", args, reply=Nothing, deadline_seconds=DEADLINE_SECONDS))

        for _ in range(window):
            send()
        receive = lambda: _touch(waiting.popleft().result(DEADLINE_SECONDS).tensors["data"])  # noqa: E731
        return _count(seconds, window, receive, send)

    return [ask, lambda size, window, seconds: ask(size, window, seconds, in_place=True)]


def _ask_ray(stack: ExitStack) -> list[Ask]:
    """For torch tensors, and for numpy arrays."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 31, log_to_driver=False)
    stack.callback(ray.shutdown)

    class Actor:
        def __init__(self) -> None:
            import torch

            self.arrays = _arrays()
            self.tensors = {size: [torch.from_numpy(one) for one in some] for size, some in self.arrays.items()}
            self.turn = 0

        def torch(self, size: int) -> Any:
            self.turn += 1
            return self.tensors[size][self.turn % 4]

        def numpy(self, size: int) -> Any:
            self.turn += 1
            return self.arrays[size][self.turn % 4]

    actor: Any = ray.remote(Actor).remote()

    def asking(method: Any) -> Ask:
        def ask(size: int, window: int, seconds: float) -> float:
            waiting: deque[Any] = deque(method.remote(size) for _ in range(window))
            take = lambda: cast("Any", ray.get(waiting.popleft(), timeout=DEADLINE_SECONDS))  # noqa: E731
            return _count(
                seconds, window, lambda: _touch(np.asarray(take())), lambda: waiting.append(method.remote(size))
            )

        return ask

    return [asking(actor.torch), asking(actor.numpy)]


def _ask_memcpy() -> Ask:
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

    return ask


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
    """Measure everything, judge it, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one trial")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "services_transport.json")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gkr-bench-")))
        transports = _transports(stack, folder, with_ray=not options.without_ray)
        rates, costs = _measure(transports, options)
    replies, seconds = _medians(rates), _medians(costs)
    for key, row in replies.items():
        print(f"services_transport: {key:>8}: " + ", ".join(f"{name} {rate:,.0f}/s" for name, rate in row.items()))
    result: dict[str, Any] = {
        "name": "services_transport",
        "machine": machine(),
        "verdicts": _verdicts(replies, seconds),
        "replies_per_second": replies,
        "cpu_seconds_per_gb": seconds,
        "trials": rates,
        "cpu_trials": costs,
    }
    write_result(options.output, result)


def _transports(stack: ExitStack, folder: Path, *, with_ray: bool) -> dict[str, Transport]:
    every, large = list(SIZES), ["16MB"]
    ours, in_place = _ask_ours(stack, f"ipc://{folder}/ours", folder=folder)
    sealed, _ = _ask_ours(stack, f"ipc://{folder}/sealed", folder=folder, secret=SECRET)
    # A name that could be another machine's, so that no memory is shared.
    apart, _ = _ask_ours(stack, "tcp://127.0.0.1:*", folder=folder, as_host="localhost")
    keys = zmq.curve_keypair()
    found = {
        "memcpy": Transport(_ask_memcpy(), every),
        "zmq": Transport(_ask_zmq(stack, f"ipc://{folder}/bare"), every),
        "zmq_curve": Transport(_ask_zmq(stack, f"ipc://{folder}/curve", keys), ["1MB"]),
        "ours": Transport(ours, every),
        "ours_token": Transport(sealed, ["1MB"]),
        "ours_in_place": Transport(in_place, large),
        "ours_tcp": Transport(apart, large),
    }
    if with_ray:
        torch, numpy = _ask_ray(stack)
        found |= {"ray": Transport(torch, every), "ray_numpy": Transport(numpy, large)}
    return found


def _measure(
    transports: dict[str, Transport], options: argparse.Namespace
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[float]]]]:
    """Replies per second and CPU seconds per GB of every trial."""
    rates: dict[str, dict[str, list[float]]] = {}
    costs: dict[str, dict[str, list[float]]] = {}
    for label in options.sizes:  # connections, memory and Ray's workers are there before anything is measured
        for transport in transports.values():
            transport.ask(SIZES[label], max(WINDOWS), 0.05)
    for _ in range(options.trials):
        for label in options.sizes:
            for window in WINDOWS:
                key = f"{label} w{window}"
                for name, transport in transports.items():  # close together in time: the machine is shared
                    if label not in transport.sizes:
                        continue
                    cpu, began = _cpu_seconds(), time.perf_counter()
                    rate = transport.ask(SIZES[label], window, options.seconds)
                    gigabytes = rate * (time.perf_counter() - began) * SIZES[label] / 1e9
                    rates.setdefault(key, {}).setdefault(name, []).append(rate)
                    costs.setdefault(key, {}).setdefault(name, []).append((_cpu_seconds() - cpu) / gigabytes)
    return rates, costs


def _cpu_seconds() -> float:
    """Of this process and all that it started."""
    total = 0.0
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def _medians(found: dict[str, dict[str, list[float]]]) -> Rows:
    return {key: {name: statistics.median(some) for name, some in row.items()} for key, row in found.items()}


def _verdicts(replies: Rows, costs: Rows) -> list[dict[str, object]]:
    """The rows of the claim, of what was measured."""
    found: list[dict[str, object]] = []

    def rate(key: str, other: str, words: str, *, name: str = "ours", what: str = "", least: float | None) -> None:
        row = replies.get(key, {})
        if name in row and other in row:
            against, unit = f"{words} {row[other]:,.0f}/s", "replies/s"
            ratio = row[name] / row[other]
            found.append(
                verdict(what or key, measured=row[name], unit=unit, against=against, ratio=ratio, at_least=least)
            )

    rate("1KB w1", "zmq", "bare ZeroMQ", what="1 KB, 1 outstanding, of bare", least=0.75)
    rate("1KB w4", "zmq", "bare ZeroMQ", what="1 KB, 4 outstanding, of bare", least=0.5)
    rate("1KB w1", "ray", "Ray", what="1 KB, 1 outstanding", least=9)
    rate("1KB w4", "ray", "Ray", what="1 KB, 4 outstanding", least=9)
    rate("1MB w1", "ray", "Ray", what="1 MB, 1 outstanding", least=17)
    rate("1MB w4", "ray", "Ray", what="1 MB, 4 outstanding", least=17)
    rate("1MB w1", "ours", "no token", name="ours_token", what="1 MB with the run's token, 1 outstanding", least=0.9)
    rate("1MB w4", "ours", "no token", name="ours_token", what="1 MB with the run's token, 4 outstanding", least=0.9)
    rate("1MB w4", "zmq_curve", "ZeroMQ with CURVE", name="ours_token", what="1 MB with the run's token", least=None)
    rate("16MB w1", "memcpy", "one copy in one process", what="16 MB, one copy, 1 outstanding", least=0.65)
    rate("16MB w4", "memcpy", "one copy in one process", what="16 MB, one copy, 4 outstanding", least=0.65)
    rate("16MB w4", "ray", "Ray", what="16 MB, one copy, 4 outstanding, of Ray", least=None)
    for window in WINDOWS:
        row = replies.get(f"16MB w{window}", {})
        if "ours_in_place" in row:
            what = f"16 MB computed in place, {window} outstanding"
            found.append(verdict(what, measured=row["ours_in_place"], unit="replies/s", at_least=5000))
    rate("16MB w4", "ray_numpy", "Ray with numpy", name="ours_tcp", what="16 MB between machines (TCP)", least=None)
    row = costs.get("16MB w4", {})
    for name, words, most in (("ours", "one copy", 0.07), ("ours_tcp", "between machines (TCP)", 0.4)):
        if name in row:
            others = ", ".join(f"{other} {row[other]:.2f}" for other in ("zmq", "ray", "ray_numpy") if other in row)
            what = f"16 MB, CPU per GB, {words}"
            found.append(verdict(what, measured=row[name], unit="s", against=others, at_most=most))
    return found


if __name__ == "__main__":
    main()
