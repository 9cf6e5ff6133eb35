"""Claim: a rank that floods a service raises a quiet rank's latency by at most one batch; equals get equal shares.

One run measures three services that do the same work, each in a process of its own, one request of 2 ms at a time:
ours, a bare ROUTER drained into one first-in-first-out queue, and a fresh Ray actor. Ranks are threads in two other
processes, the loud one alone in its own. Three loads: a flood of 256 outstanding small requests beside three quiet
ranks, which ask one thing at a time with a pause of 5 ms; the same with requests of 16 MB in the flood (32 of them, and
the Ray actor gets one and the same object by reference); and eight ranks that always want more, of which one keeps 256
outstanding and seven keep 4. Trials of the services alternate.

    python -m benchmarks.service_fairness [--seconds 2] [--trials 3] [--without-ray]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks._services import DEADLINE_SECONDS, Work, ask, publish, quantile, serve, started, until_told
from benchmarks._verdicts import RESULTS, machine, verdict, write_result
from services.client import ServiceClient

SERVICE_SECONDS = 0.002
PAUSE_SECONDS = 0.005
LEAD_SECONDS = 0.5
"""How long the load runs before anything counts."""
QUEUE = {"queue_depth": 8, "queue_bytes": 64 << 20}


@dataclass(frozen=True)
class Rank:
    """How one rank asks."""

    outstanding: int = 1
    size: int = 1 << 10
    """Bytes of each request."""
    pause_seconds: float = 0.0


LOADS: dict[str, tuple[list[Rank], list[Rank]]] = {
    "flood": ([Rank(256)], [Rank(pause_seconds=PAUSE_SECONDS)] * 3),
    "flood of 16 MB": ([Rank(32, size=16 << 20)], [Rank(pause_seconds=PAUSE_SECONDS)] * 3),
    "equals": ([Rank(256)], [Rank(4)] * 7),
}
"""The loud rank, and the others."""

Submit = Callable[[], Callable[[], object]]
"""Sends one request; what it returns waits for the reply."""


# --- three services, and how each is asked


def _ours(address: str, name: str, rank: Rank) -> Submit:
    client = ServiceClient(Path(address), service="worker", identity=name)
    data = np.zeros(rank.size, dtype=np.uint8)
    work = Work(seconds=SERVICE_SECONDS)
    return lambda: partial(ask(client, work, data=data).result, DEADLINE_SECONDS)


def _fifo(address: str, name: str, rank: Rank) -> Submit:
    del name
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_SECONDS))
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(address)
    data = np.zeros(rank.size, dtype=np.uint8)

    def submit() -> Callable[[], object]:
        dealer.send(data, copy=rank.size < 1 << 16)
        return dealer.recv

    return submit


def _ray(address: str, name: str, rank: Rank) -> Submit:
    import ray

    del name
    if not ray.is_initialized():
        ray.init(address=address, namespace="fairness", log_to_driver=False)
    actor: Any = ray.get_actor("worker")
    data = ray.put(np.zeros(rank.size, dtype=np.uint8))
    return lambda: partial(ray.get, actor.work.remote(data), timeout=DEADLINE_SECONDS)


def _serve_fifo(pipe: Connection, address: str) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    pipe.send(address)
    waiting: deque[bytes] = deque()
    while True:
        while not waiting or router.poll(0):
            waiting.append(router.recv_multipart(copy=False)[0].bytes)
        time.sleep(SERVICE_SECONDS)
        router.send_multipart([waiting.popleft(), b""])


@contextmanager
def _serving_ours(folder: Path) -> Generator[str]:
    with started(serve, f"ipc://{folder}/ours", 1, {}, QUEUE) as server:
        yield str(publish(folder / "directory.json", epoch=1, endpoints=[(1, server.hear())]))


@contextmanager
def _serving_fifo(folder: Path) -> Generator[str]:
    with started(_serve_fifo, f"ipc://{folder}/fifo") as server:
        yield server.hear()


@contextmanager
def _serving_ray(_folder: Path) -> Generator[str]:
    import ray

    class Actor:
        def work(self, _data: Any) -> None:
            time.sleep(SERVICE_SECONDS)

    here: Any = ray.init(
        "local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False,
        namespace="fairness",
    )  # fmt: skip
    try:
        actor: Any = ray.remote(Actor).options(name="worker").remote()
        ray.get(actor.work.remote(None), timeout=DEADLINE_SECONDS)
        yield here.address_info["gcs_address"]
    finally:
        ray.shutdown()


ASKED: dict[str, Callable[[str, str, Rank], Submit]] = {"ours": _ours, "fifo": _fifo, "ray": _ray}
SERVED = {"ours": _serving_ours, "fifo": _serving_fifo, "ray": _serving_ray}


# --- ranks


def _ask_all(pipe: Connection, contender: str, address: str) -> None:
    """Target of a process: for each list of ranks it is told, their latencies between two times it is told then."""
    while (told := until_told(pipe)) is not None:
        names, ranks = told
        submits = [ASKED[contender](address, name, rank) for name, rank in zip(names, ranks, strict=True)]
        for submit in submits:
            submit()()  # connect
        pipe.send("ready")
        begin, end = until_told(pipe)
        found: list[list[float]] = [[] for _ in ranks]
        threads = [
            threading.Thread(target=_loop, args=(submit, rank, begin, end, latencies))
            for submit, rank, latencies in zip(submits, ranks, found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        pipe.send(found)


def _loop(submit: Submit, rank: Rank, begin: float, end: float, latencies: list[float]) -> None:
    """Keep the rank's requests outstanding until `end`; count the replies that come between `begin` and then."""
    waiting: deque[tuple[float, Callable[[], object]]] = deque()
    while True:
        while len(waiting) < rank.outstanding and time.monotonic() < end:
            waiting.append((time.monotonic(), submit()))
        if not waiting:
            return
        sent, wait = waiting.popleft()
        wait()
        now = time.monotonic()
        if begin <= now < end:
            latencies.append(now - sent)
        if rank.pause_seconds:
            time.sleep(rank.pause_seconds)


def measure(contender: str, folder: Path, *, loads: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """One trial of one service under each load."""
    found: dict[str, dict[str, Any]] = {}
    with SERVED[contender](folder) as address:
        for load in loads:
            with ExitStack() as stack:
                sides = [stack.enter_context(started(_ask_all, contender, address)) for _ in range(2)]
                for number, (side, ranks) in enumerate(zip(sides, LOADS[load], strict=True)):
                    side.tell(([f"{load}-{number}-{rank}" for rank in range(len(ranks))], ranks))
                for side in sides:
                    side.hear()
                begin = time.monotonic() + LEAD_SECONDS
                for side in sides:
                    side.tell((begin, begin + seconds))
                loud, others = (side.hear() for side in sides)
            found[load] = summary(loud + others if load == "equals" else others)
            found[load]["loud_replies"] = len(loud[0])
    return found


def summary(latencies: list[list[float]]) -> dict[str, Any]:
    """Of several ranks."""
    each = sorted(1000 * one for rank in latencies for one in rank)
    counts = [len(rank) for rank in latencies]
    return {
        "replies": len(each),
        "p50_ms": quantile(each, 0.5),
        "p99_ms": quantile(each, 0.99),
        "max_ms": each[-1] if each else float("nan"),
        "jain": sum(counts) ** 2 / (len(counts) * sum(one**2 for one in counts)) if each else 0.0,
    }


def judge(middle: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, object]]:
    """Rows, from the medians of each service under each load."""
    others = {name: one for name, one in middle.items() if name != "ours"}
    rows: list[dict[str, object]] = []
    for load, found in middle["ours"].items():
        if load == "equals":
            against = ", ".join(f"{name} {one[load]['jain']:.2f}" for name, one in others.items())
            what = "equal shares of 8 ranks (Jain)"
            rows.append(verdict(what, measured=found["jain"], unit="", against=against, at_least=0.99))
            continue
        p99, p50, fifo = found["p99_ms"], found["p50_ms"], others["fifo"][load]["p50_ms"]
        against = ", ".join(f"{name} {one[load]['p99_ms']:.0f} ms" for name, one in others.items())
        rows.append(verdict(f"quiet p99 under a {load}", measured=p99, unit="ms", against=against, at_most=5))
        what = f"quiet median under a {load}, of one queue's"
        rows.append(verdict(what, measured=p50, unit="ms", against=f"fifo {fifo:.0f} ms", ratio=p50 / fifo))
    return rows


def main() -> None:
    """Measure all, judge the medians, write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one service under one load")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "service_fairness.json")
    options = parser.parse_args()
    contenders = ["ours", "fifo", *([] if options.without_ray else ["ray"])]
    trials: list[dict[str, dict[str, dict[str, Any]]]] = []
    for _ in range(options.trials):
        with tempfile.TemporaryDirectory(prefix="gkr-bench-") as folder:
            trials.append({
                name: measure(name, Path(folder), loads=options.loads, seconds=options.seconds) for name in contenders
            })  # fmt: skip
    middle = {
        name: {
            load: {key: statistics.median(trial[name][load][key] for trial in trials) for key in trials[0][name][load]}
            for load in options.loads
        }
        for name in contenders
    }
    rows = [{"load": load, "service": name, **middle[name][load]} for load in options.loads for name in contenders]
    result = {"machine": machine(), "verdicts": judge(middle), "medians": rows, "trials": trials}
    write_result(options.output, result)


if __name__ == "__main__":
    main()
