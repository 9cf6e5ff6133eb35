"""Claim: one replica serves 4,096 ranks, each with its own bounded queue, and gives every one of them its share.

Four processes hold 1,024 ranks each: a DEALER per rank that greets, is granted its queue, and keeps two requests
outstanding whose replies are 1 KB. They send messages of the real protocol that were packed before and only count what
comes back, so that the replica is the one that is busy. The same processes ask a bare ROUTER that does nothing but
answer with as many bytes. Rates are of the wall clock, on a machine where those who ask compete with the replica for
cores, and per second of the replica's own CPU time, which is what a replica with cores of its own does.

    python -m benchmarks.service_ranks [--ranks 4096] [--seconds 20] [--trials 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from benchmarks._services import DEADLINE_SECONDS, Started, Work, serve, started, until_told
from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from services.wire.frames import Buffer, Header, Kind, encode_body, pack, unpack

SIZE = 1 << 10
PROCESSES = 4
OUTSTANDING = 2
LEAD_SECONDS = 1.0
BATCH = 64
QUEUE = {"queue_depth": 8, "queue_bytes": 1 << 20}

Requests = Callable[[int], Sequence[Buffer]]
"""The frames of a rank's n-th request, from 1 on."""


def _requests_of_ours(number: int) -> Sequence[Buffer]:
    header = Header(kind=Kind.REQUEST, request=number, method="work", deadline_ms=int(1000 * DEADLINE_SECONDS))
    return pack(header, encode_body(Work(size=SIZE, number=number)))


def _bare_requests(number: int) -> Sequence[Buffer]:
    return [number.to_bytes(8, "little")]


def _serve_bare(pipe: Connection, address: str) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    router.bind(address)
    pipe.send(address)
    answer = bytes(SIZE)
    while True:
        route, _ = router.recv_multipart()
        router.send_multipart([route, answer])


def _be_ranks(pipe: Connection, address: str, first: int, ranks: int, contender: str) -> None:
    """Target of a process: connects its ranks, then counts the replies of each between two times it is told."""
    requests = _requests_of_ours if contender == "ours" else _bare_requests
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, ranks + 16)
    poller = zmq.Poller()
    dealers = [context.socket(zmq.DEALER) for _ in range(ranks)]
    for number, dealer in enumerate(dealers):
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        hello = Header(kind=Kind.HELLO, identity=f"rank-{first + number}", incarnation=1, service="worker")
        dealer.send_multipart(pack(hello) if contender == "ours" else requests(0))
    for dealer in dealers:
        if not dealer.poll(int(1000 * DEADLINE_SECONDS)):
            raise TimeoutError("a rank was not welcomed")
        frames = dealer.recv_multipart()
        assert contender == "bare" or unpack(frames).header.kind is Kind.WELCOME
    pipe.send("connected")
    begin, end = until_told(pipe)
    for dealer in dealers:
        poller.register(dealer, zmq.POLLIN)
    place = {dealer: number for number, dealer in enumerate(dealers)}
    pipe.send(_count(poller, place, requests, begin=begin, end=end))


def _count(poller: zmq.Poller, place: dict[Any, int], requests: Requests, *, begin: float, end: float) -> list[int]:
    """Replies of each rank between `begin` and `end`, with a constant number outstanding."""
    packed: list[Sequence[Buffer]] = [(), *(requests(number) for number in range(1, OUTSTANDING + 1))]
    sent, counts = [OUTSTANDING] * len(place), [0] * len(place)
    for dealer in place:
        for frames in packed[1:]:
            dealer.send_multipart(frames)
    while (now := time.monotonic()) < end:
        for dealer, _ in poller.poll(100):
            number = place[dealer]
            frames = dealer.recv_multipart()
            if len(frames[-1]) < SIZE:
                # To a rank that has not begun the replica states its grant again from time to time.
                assert unpack(frames).header.kind is Kind.CREDIT, "the answer is not what was asked for"
                continue
            counts[number] += now >= begin
            sent[number] += 1
            if sent[number] == len(packed):
                packed.append(requests(sent[number]))
            dealer.send_multipart(packed[sent[number]])
    return counts


@contextmanager
def _serving(contender: str, folder: Path) -> Generator[tuple[Started, str]]:
    address = f"ipc://{folder}/{contender}"
    target: Callable[..., None] = serve if contender == "ours" else _serve_bare
    with started(target, address, *((1, {"max_batch": BATCH}, QUEUE) if contender == "ours" else ())) as server:
        yield server, server.hear()


def measure(contender: str, folder: Path, *, ranks: int, seconds: float) -> dict[str, float]:
    """One trial of one replica."""
    each = ranks // PROCESSES
    with _serving(contender, folder) as (server, address), ExitStack() as stack:
        sides = [
            stack.enter_context(started(_be_ranks, address, each * one, each, contender)) for one in range(PROCESSES)
        ]
        for side in sides:
            side.hear()
        begin = time.monotonic() + LEAD_SECONDS
        for side in sides:
            side.tell((begin, begin + seconds))
        time.sleep(LEAD_SECONDS)
        before = server.cpu_seconds()
        counts = [count for side in sides for count in side.hear(deadline_seconds=seconds + DEADLINE_SECONDS)]
        cpu = server.cpu_seconds() - before
        memory = server.memory_bytes()
    mean = sum(counts) / len(counts)
    return {
        "rps": sum(counts) / seconds,
        "rps_per_cpu_second": sum(counts) / cpu,
        "replies_per_rank": mean,
        "smallest_share": min(counts) / mean,
        "largest_share": max(counts) / mean,
        "memory_mb": memory / 1e6,
    }


def main() -> None:
    """Measure both in turns, judge the medians, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one trial")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "service_ranks.json")
    options = parser.parse_args()
    trials: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
    for _ in range(options.trials):
        for contender, found in trials.items():
            with tempfile.TemporaryDirectory(prefix="gkr-bench-") as folder:
                found.append(measure(contender, Path(folder), ranks=options.ranks, seconds=options.seconds))
    ours, bare = ({key: statistics.median(one[key] for one in found) for key in found[0]} for found in trials.values())
    name = f"{options.ranks:,} ranks, 1 KB"
    rows = [
        verdict(name, measured=ours["rps"], unit="rps", at_least=50_000),
        verdict(f"{name}, of a bare ROUTER", measured=ours["rps"], unit="rps",
                against=f"bare {bare['rps']:,.0f} rps", ratio=ours["rps"] / bare["rps"]),
        verdict(f"{name}, per second of the replica's CPU", measured=ours["rps_per_cpu_second"], unit="requests",
                against=f"bare {bare['rps_per_cpu_second']:,.0f} requests",
                ratio=ours["rps_per_cpu_second"] / bare["rps_per_cpu_second"]),
        verdict(f"{name}, smallest share of a rank", measured=ours["smallest_share"], unit="of the mean",
                against=f"bare {bare['smallest_share']:.2f}", at_least=0.9),
    ]  # fmt: skip
    medians = [{"replica": "ours", **ours}, {"replica": "bare ROUTER", **bare}]
    result = {"machine": machine(), "ranks": options.ranks, "verdicts": rows, "medians": medians, "trials": trials}
    write_result(options.output, result)


if __name__ == "__main__":
    main()
