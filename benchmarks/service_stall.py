"""Claim: a stalled service takes no more memory than it granted, whatever its ranks want to send.

A replica computes one request that never ends. 64 ranks in four processes want to send 24 requests of 1 MB each, all of
them one array, so that a rank's own data takes no part in what grows. Granted to each are 8 requests and 4 MB of them.
What grows is the memory of the replica and of the ranks' processes together, pages that they share counted once, from
when all are connected to when nothing has grown for a while. Asked beside it: bare DEALER and ROUTER with ZeroMQ's
defaults, whose ROUTER stopped to read; each buffers up to 1,000 messages at both ends, so it takes all there is. Twice:
replica on this machine, where large requests lie in memory that both see, and as if it were on another.

    python -m benchmarks.service_stall [--requests 24] [--trials 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq

from benchmarks._services import DEADLINE_SECONDS, Started, Work, ask, publish, serve, started, until_told
from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from services.client import ServiceClient

RANKS, PROCESSES = 64, 4
SIZE = 1 << 20
GRANT_BYTES = 4 << 20
QUEUE = {"queue_depth": 8, "queue_bytes": GRANT_BYTES}
STILL_SECONDS = 1.5
"""Without growth, until it is over."""
LOOK_SECONDS = 0.25
STILL_BYTES = 1 << 20


def _ours(address: str, name: str) -> Callable[[np.ndarray], object]:
    client = ServiceClient(Path(address), service="worker", identity=name)
    ask(client, Work()).result(DEADLINE_SECONDS)  # connect
    return lambda data: ask(client, Work(), data=data)


def _bare(address: str, name: str) -> Callable[[np.ndarray], object]:
    del name
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(address)
    dealer.send(b"")
    assert dealer.poll(int(1000 * DEADLINE_SECONDS)), "no answer"

    def send(data: np.ndarray) -> None:
        dealer.send(data, zmq.DONTWAIT, copy=False)

    return send


def _be_ranks(pipe: Connection, contender: str, address: str, names: list[str], requests: int) -> None:
    """Target of a process: connects its ranks; told to, each wants to send all its requests at once."""
    data = np.ones(SIZE, dtype=np.uint8)
    sends = [(_bare if contender == "bare" else _ours)(address, name) for name in names]
    pipe.send("connected")
    until_told(pipe)
    kept = [send(data) for send in sends for _ in range(requests)]
    pipe.send(len(kept))
    until_told(pipe)


def _serve_bare(pipe: Connection, address: str) -> None:
    """Answers one small request of each rank, then stalls."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
    for _ in range(RANKS):
        router.send_multipart(router.recv_multipart())
    until_told(pipe)


@contextmanager
def _serving(contender: str, folder: Path) -> Generator[tuple[Started, str]]:
    """A replica that has stalled, or will once all ranks are connected."""
    if contender == "bare":
        with started(_serve_bare, "tcp://127.0.0.1:*") as server:
            yield server, server.hear()
        return
    with started(serve, "tcp://127.0.0.1:*", 1, {}, QUEUE) as server:
        endpoint: str = server.hear()
        if contender == "far":
            # Only addresses that are loopback by their number are taken for local.
            endpoint = endpoint.replace("127.0.0.1", "localhost")
        yield server, str(publish(folder / "directory.json", epoch=1, endpoints=[(1, endpoint)]))


def measure(contender: str, folder: Path, *, requests: int) -> float:
    """Bytes that a stall made everything grow by."""
    with _serving(contender, folder) as (server, address), ExitStack() as stack:
        names = [[f"rank-{one}-{rank}" for rank in range(RANKS // PROCESSES)] for one in range(PROCESSES)]
        sides = [stack.enter_context(started(_be_ranks, contender, address, some, requests)) for some in names]
        for side in sides:
            side.hear()
        if contender != "bare":
            staller = ServiceClient(Path(address), service="worker", identity="staller")
            stack.callback(staller.close)
            ask(staller, Work(seconds=DEADLINE_SECONDS))
        everybody = [server, *sides]
        before = sum(one.memory_bytes() for one in everybody)
        for side in sides:
            side.tell("send")
        for side in sides:
            side.hear()
        return _grown(everybody, before=before)


def _grown(processes: list[Started], *, before: int) -> float:
    limit = time.monotonic() + DEADLINE_SECONDS
    most, since = 0, time.monotonic()
    while time.monotonic() - since < STILL_SECONDS:
        if time.monotonic() > limit:
            raise TimeoutError(f"memory still grew after {DEADLINE_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
        grown = sum(one.memory_bytes() for one in processes) - before
        if grown > most + STILL_BYTES:
            most, since = grown, time.monotonic()
    return most


def main() -> None:
    """Measure all in turns, judge the medians, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24, help="that each rank wants to send")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--without-bare", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "service_stall.json")
    options = parser.parse_args()
    trials: dict[str, list[float]] = {"near": [], "far": [], **({} if options.without_bare else {"bare": []})}
    for _ in range(options.trials):
        for contender, found in trials.items():
            with tempfile.TemporaryDirectory(prefix="gkr-bench-") as folder:
                found.append(measure(contender, Path(folder), requests=options.requests))
    grants, wanted = RANKS * GRANT_BYTES, RANKS * options.requests * SIZE
    grown = {name: statistics.median(found) for name, found in trials.items()}
    against = f"grants of {grants / 1e6:.0f} MB"
    if "bare" in grown:
        against += f"; bare {grown['bare'] / 1e6:.0f} of {wanted / 1e6:.0f} MB wanted"
    rows = [
        verdict(f"growth under a stalled replica, {place}", measured=grown[name] / 1e6, unit="MB", against=against,
                ratio=grown[name] / grants, at_most=1.1)
        for name, place in (("near", "one machine"), ("far", "two machines"))
    ]  # fmt: skip
    result = {
        "machine": machine(), "ranks": RANKS, "granted_bytes": grants, "wanted_bytes": wanted, "verdicts": rows,
        "grown_bytes": grown, "trials": trials,
    }  # fmt: skip
    write_result(options.output, result)


if __name__ == "__main__":
    main()
