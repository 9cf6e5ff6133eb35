"""Claim: SIGKILL of a replica under load loses no request, counts none twice, and nobody waits for more than a second.

Two replicas of the evaluation service and four ranks in a process of their own, each with eight calls of `accumulate`
outstanding: four images whose measures are kept under (rank, number). Again and again one replica is killed, and its
successor is published when it is warm. At the end the service's own total says how many parts and images were counted.
The pause is the longest time without a reply that a rank had after a kill, of all kills and ranks. Beside it: bare
DEALER sockets with as much outstanding at two ROUTERs that echo, of which one is killed and started again at its
address, as often.

    python -m benchmarks.service_kill [--kills 6]
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks._services import DEADLINE_SECONDS, Started, publish, quantile, serve, started, until_told
from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from services.client import ServiceClient
from services.prepare.__main__ import prepare
from services.service import Reply
from services.wire.messages import AccumulateArgs, AccumulateReply, TotalArgs, TotalReply
from spec.errors import GkrError

RANKS, OUTSTANDING, IMAGES = 4, 8, 4
UNDISTURBED_SECONDS = 1.0
"""Of load, before each kill."""
AFTER_SECONDS = 3.0
"""Of a kill, in which pauses are its own."""
RUN = "bench"


@dataclass
class Told:
    """What one rank was told."""

    sent: int = 0
    ends: list[float] = field(default_factory=list[float])
    """Monotonic times of the replies."""
    errors: list[str] = field(default_factory=list[str])
    again: int = 0
    """Parts that another replica had counted already: what would have been doubled."""


# --- ours


def _be_ranks(pipe: Connection, directory: str, manifest: str, folder: str) -> None:
    """Target of a process: ranks that ask until they are told to stop; says what each was told."""
    stop = threading.Event()
    found = [Told() for _ in range(RANKS)]
    threads = [
        threading.Thread(target=_be_rank, args=(rank, Path(directory), manifest, folder, told, stop))
        for rank, told in enumerate(found)
    ]
    for thread in threads:
        thread.start()
    pipe.send("asking")
    until_told(pipe)
    stop.set()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    pipe.send(found)


def _be_rank(rank: int, directory: Path, manifest: str, folder: str, told: Told, stop: threading.Event) -> None:
    images = np.zeros((IMAGES, 8, 8, 1), dtype=np.uint8)
    waiting: deque[Future[Reply]] = deque()
    with closing(ServiceClient(directory, service="judge", identity=f"rank-{rank}")) as client:
        while waiting or not stop.is_set():
            while len(waiting) < OUTSTANDING and not stop.is_set():
                args = AccumulateArgs(
                    manifest=manifest, labels=[0] * IMAGES, run=RUN, shard=rank, sequence=told.sent, folder=folder
                )
                images = np.full_like(images, told.sent % 256)
                waiting.append(
                    client.submit("accumulate", args, reply=AccumulateReply, tensors={"images": images},
                                  deadline_seconds=DEADLINE_SECONDS)
                )  # fmt: skip
                told.sent += 1
            try:
                reply = waiting.popleft().result(DEADLINE_SECONDS)
            except GkrError as error:
                told.errors.append(error.message)
            else:
                told.again += not reply.body.applied
                told.ends.append(time.monotonic())


def measure_ours(folder: Path, *, kills: int) -> dict[str, Any]:
    """Kill one of two replicas so often."""
    manifest = (folder / "digits" / "manifest.json").as_uri()
    prepare(manifest, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=DEADLINE_SECONDS)
    context = {
        "kind": "evaluate", "name": "judge", "cache_dir": folder / "cache", "manifest": manifest, "max_batch": 32,
    }  # fmt: skip
    parts = (folder / "parts").as_uri()
    with ExitStack() as stack:

        def start(index: int, incarnation: int) -> tuple[Started, tuple[int, str]]:
            address = f"ipc://{folder}/judge-{index}-{incarnation}"
            process = stack.enter_context(started(serve, address, incarnation, context, {"queue_depth": OUTSTANDING}))
            return process, (incarnation, process.hear(deadline_seconds=2 * DEADLINE_SECONDS))

        def tell(epoch: int) -> Path:
            endpoints = [endpoint for _, endpoint in replicas]
            return publish(
                folder / "directory.json", epoch=epoch, endpoints=endpoints, service="judge", kind="evaluate"
            )

        replicas = [start(index, 1) for index in range(2)]
        directory = tell(1)
        ranks = stack.enter_context(started(_be_ranks, str(directory), manifest, parts))
        ranks.hear()
        killed: list[float] = []
        for number in range(kills):
            time.sleep(UNDISTURBED_SECONDS)
            killed.append(time.monotonic())
            replicas[number % 2][0].kill()
            replicas[number % 2] = start(number % 2, number + 2)
            tell(number + 2)
        time.sleep(AFTER_SECONDS)
        ranks.tell("stop")
        found: list[Told] = ranks.hear()
        client = stack.enter_context(closing(ServiceClient(directory, service="judge", identity="counter")))
        args = TotalArgs(manifest=manifest, run=RUN, folder=parts)
        total: TotalReply = client.call("total", args, reply=TotalReply, deadline_seconds=DEADLINE_SECONDS).body
    sent = sum(one.sent for one in found)
    seconds = max(end for one in found for end in one.ends) - min(end for one in found for end in one.ends)
    return {
        "requests": sent,
        "requests_per_second": sent / seconds,
        "kills": kills,
        "answered": sum(len(one.ends) for one in found),
        "errors": [error for one in found for error in one.errors],
        "counted_parts": total.parts,
        "counted_images": total.samples,
        "computed_again": sum(one.again for one in found),
        "pauses_ms": [1000 * pause for one in found for pause in pauses(one.ends, killed)],
    }


def pauses(ends: Sequence[float], killed: Sequence[float]) -> list[float]:
    """For each kill the longest time without a reply after it, in seconds; until the next kill at most."""
    found: list[float] = []
    for kill, until in zip(killed, [*killed[1:], float("inf")], strict=True):
        last = min(kill + AFTER_SECONDS, until)
        times = [kill, *(end for end in ends if kill < end <= last), last]
        found.append(max(after - before for before, after in pairwise(times)))
    return found


# --- bare


def _echo(pipe: Connection, address: str) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    pipe.send(address)
    while True:
        frames = router.recv_multipart()
        time.sleep(0.001)  # as if it computed something
        router.send_multipart(frames)


def measure_bare(folder: Path, *, kills: int) -> dict[str, int]:
    """The same with DEALER and ROUTER: a request is lost if nothing has come of it when everything else is over."""
    addresses = [f"ipc://{folder}/bare-{index}" for index in range(2)]
    sent = answered = 0
    with ExitStack() as stack:
        servers = [stack.enter_context(started(_echo, address)) for address in addresses]
        for server in servers:
            server.hear()
        dealer = stack.enter_context(closing(zmq.Context.instance().socket(zmq.DEALER)))
        dealer.setsockopt(zmq.LINGER, 0)
        for address in addresses:
            dealer.connect(address)
        for number in range(kills):
            until = time.monotonic() + UNDISTURBED_SECONDS
            outstanding = 0
            while time.monotonic() < until:
                for _ in range(RANKS * OUTSTANDING - outstanding):
                    dealer.send(sent.to_bytes(8, "little"))
                    sent, outstanding = sent + 1, outstanding + 1
                if dealer.poll(100):
                    dealer.recv()
                    answered, outstanding = answered + 1, outstanding - 1
            servers[number % 2].kill()
            servers[number % 2] = stack.enter_context(started(_echo, addresses[number % 2]))
            servers[number % 2].hear()
            while dealer.poll(int(1000 * UNDISTURBED_SECONDS)):
                dealer.recv()
                answered += 1
    return {"requests": sent, "kills": kills, "lost": sent - answered}


def main() -> None:
    """Measure both, judge, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--output", type=Path, default=RESULTS / "service_kill.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gkr-bench-") as name:
        ours = measure_ours(Path(name), kills=options.kills)
        bare = measure_bare(Path(name), kills=options.kills)
    requests, images = ours["requests"], ours["counted_images"]
    rows = [
        verdict("requests lost to killed replicas", measured=requests - ours["answered"], unit=f"of {requests:,}",
                against=f"bare ZeroMQ {bare['lost']} of {bare['requests']:,}", at_most=0),
        verdict("effects lost to killed replicas", measured=requests - ours["counted_parts"], unit=f"of {requests:,}",
                at_most=0),
        verdict("effects doubled by killed replicas", measured=images / IMAGES - ours["counted_parts"],
                unit=f"of {requests:,}", against=f"{ours['computed_again']} computed twice", at_most=0),
        verdict("longest pause of a rank after a kill, p99", measured=quantile(ours["pauses_ms"], 0.99), unit="ms",
                against=f"{options.kills} kills, {RANKS} ranks", at_most=1000),
    ]  # fmt: skip
    write_result(options.output, {"machine": machine(), "verdicts": rows, "ours": ours, "bare": bare})


if __name__ == "__main__":
    main()
