"""Claim: how long a round between regions takes, and what it blocks, can be said before it is tried.

Measures what each stage costs on a core of this machine (in time of the core, so that others on it do not count), then
three small runs of the real syncer and real clients over
loopback with limited links, and compares them with the model of `benchmarks/_sync_model.py`. Then the model speaks of
2 to 16 learners, 1B to 100B parameters, links of 1 to 100 Gbit/s and round trips of 10 to 150 ms.
Run `python -m benchmarks.sync_scale`; writes benchmarks/results/sync_scale.json and the tables of docs/cross-region.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks._sync_model import Case, Machine, divide, hold, simulate
from benchmarks.sync_merge import give
from spec.sync import SyncConfig
from tests.builders.sync_world import ROUND_SAMPLES, Server, make_plan, start_server, together
from training.sync.client import SyncClient
from training.sync.codec import Codec, encode, encoded_bytes
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout, view_bytes
from training.sync.merge import MergeRules, average_models, measure_norm, merge
from training.sync.messages import Contribution
from training.sync.outer import OuterState, Spare

RESULTS = Path(__file__).parent / "results" / "sync_scale.json"
PAGE = Path(__file__).parents[1] / "docs" / "cross-region.md"
BEGIN, END = "<!-- tables: python -m benchmarks.sync_scale -->", "<!-- end of the tables -->"
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")
MEASURED = 8 << 20
"""Elements on which stages are timed."""
ROUNDS, SHARE_SECONDS = 3, 2.0
POINTS = (
    Case(learners=2, parameters=1 << 20, link=25e6, round_trip=0.0, codec="fp32", ranks=1),
    Case(learners=4, parameters=4 << 20, link=100e6, round_trip=0.0, codec="bf16", ranks=1),
    Case(learners=2, parameters=16 << 20, link=100e9, round_trip=0.0, codec="int8", ranks=1),
)
SYNCER_CORES, BUSY = 16, 0.5
"""Of the syncer in the tables; and the share of its worker's time from which it should be divided."""
BILLION = 1_000_000_000
SIZES, LINKS, TRIPS = (1, 7, 30, 100), (1, 10, 100), (0.01, 0.15)


def main() -> None:
    """Measure, compare, forecast, print, write."""
    machine = measure_machine()
    points = [compare(case, machine) for case in POINTS]
    for row in points:
        print(
            f"{row['parameters'] / 1e6:4.0f}M, {row['learners']} learners, {row['codec']}, {row['link'] / 1e6:.0f} "
            f"Mbit/s: predicted {row['predicted_seconds']:.2f} s, measured {row['measured_seconds']:.2f} s, "
            f"off by {row['error']:+.0%}"
        )
    large = replace(machine, cores=SYNCER_CORES)
    grid = [forecast(case, large) for case in all_cases()]
    tables = write_tables(grid, machine=machine, points=points)
    print(tables)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": asdict(machine), "points": points, "grid": grid}, indent=1) + "\n")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")


def measure_machine() -> Machine:
    """One core's rates, whoever else is on the machine."""
    values = np.random.default_rng(0).standard_normal(MEASURED, dtype=np.float32)
    wires = {codec: np.zeros(encoded_bytes(MEASURED, codec), np.uint8) for codec in CODECS}
    raw = view_bytes(values)
    outer, spare, target = OuterState.start(values.copy()), Spare(), np.zeros_like(values)
    rules = MergeRules(learning_rate=0.7, momentum=0.9, round_samples=100)
    four = [give(f"learner-{number}", "fp32", count=MEASURED) for number in range(4)]

    def merge_once() -> None:
        after = merge(outer, four, rules=rules, spare=spare, threads=1).outer
        spare.give(after.theta, after.momentum)

    averages = [(one.learner, one.delta, 100) for one in four]
    rates: dict[Codec, float] = {
        codec: rate_of(lambda codec=codec: encode(values, codec, out=wires[codec])) for codec in CODECS
    }
    looks: dict[Codec, float] = {
        codec: rate_of(partial(measure_norm, give("a", codec, count=MEASURED).delta)) for codec in CODECS
    }
    digest = 4 * rate_of(lambda: hashlib.sha256(raw).digest())
    fresh = 4 * rate_of(lambda: np.empty_like(values).fill(1))
    return Machine(
        cores=os.cpu_count() or 1,
        encode=rates,
        look=looks,
        merge=rate_of(merge_once),
        average=rate_of(lambda: average_models(averages, round_samples=100, out=target, threads=1)),
        digest=digest,
        wire=measure_wire(digest=digest),
        fresh=fresh,
        disk=measure_disk(raw),
        copy=rate_of(lambda: np.copyto(target, values)),
    )


def measure_disk(raw: memoryview) -> float:
    """Bytes per second that are written to a new file and flushed."""

    def write() -> None:
        with tempfile.TemporaryFile() as file:
            for _ in range(4):
                file.write(raw)
            file.flush()
            os.fsync(file.fileno())

    return 4 * 4 * min(rate_of(write, clock=time.perf_counter), rate_of(write))


def measure_wire(*, digest: float) -> float:
    """Bytes per second of time that client and server together take to send weights up and fetch them, with all checks,
    but without the sender's own digest, which the model counts by itself.
    """
    case = Case(learners=1, parameters=MEASURED, link=1e12, round_trip=0.0, codec="fp32", ranks=1)
    with tempfile.TemporaryDirectory() as folder, serve(case, Path(folder)) as (server, (learner,)):
        process, spent = psutil.Process(server.process.pid), list[float]()
        for seq in range(1, ROUNDS + 1):
            before = sum(process.cpu_times()[:2]) + time.process_time()
            learner.client.put_part(
                learner.delta, ema=learner.delta, ranges=learner.layout.whole, generation=learner.generation, seq=seq,
                rank=0,
            )  # fmt: skip
            learner.client.fetch(0)
            spent.append(sum(process.cpu_times()[:2]) + time.process_time() - before)
    up, down = 2 * 4 * MEASURED, 4 * MEASURED
    return (up + down) / (min(spent) - up / digest)


def scale(machine: Machine, case: Case) -> Machine:
    """What processes that share its cores have of it now: as many threads as learners, or one for the worker."""
    many, one = (measure_share(threads) for threads in (case.learners, 1))
    return replace(
        machine,
        cores=case.learners,
        encode={codec: rate * many for codec, rate in machine.encode.items()},
        look={codec: rate * many for codec, rate in machine.look.items()},
        wire=machine.wire * many,
        fresh=machine.fresh * many,
        disk=machine.disk * one,
        copy=machine.copy * many,
        merge=machine.merge * one,
        average=machine.average * one,
        digest=machine.digest * one,
    )


def measure_share(threads: int) -> float:
    """Part of a core that each of so many threads gets."""
    data = bytes(8 << 20)

    def spin() -> float:
        wall, cpu = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < SHARE_SECONDS:
            hashlib.sha256(data)
        return (time.thread_time() - cpu) / (time.perf_counter() - wall)

    with ThreadPoolExecutor(threads) as pool:
        return statistics.mean(one.result(timeout=60) for one in [pool.submit(spin) for _ in range(threads)])


def compare(case: Case, machine: Machine) -> dict[str, Any]:
    """The model's word and the real processes'."""
    with tempfile.TemporaryDirectory() as folder:
        before = scale(machine, case)
        seconds = statistics.median(measure_rounds(case, Path(folder)))
        after = scale(machine, case)
    predicted = statistics.mean([simulate(case, now).sync_seconds for now in (before, after)])
    return {
        "learners": case.learners,
        "parameters": case.parameters,
        "codec": case.codec,
        "link": case.link,
        "predicted_seconds": predicted,
        "measured_seconds": seconds,
        "error": predicted / seconds - 1,
    }


def measure_rounds(case: Case, folder: Path) -> list[float]:
    """Seconds of barrier rounds without training: from the first byte sent to the last byte fetched."""
    found: list[float] = []
    with serve(case, folder) as (_, learners):
        for _ in range(ROUNDS + 1):  # the first is on cold memory
            started = time.perf_counter()
            together(*(learner.round for learner in learners))
            found.append(time.perf_counter() - started)
    return found[1:]


@contextmanager
def serve(case: Case, folder: Path) -> Generator[tuple[Server, list[Sender]]]:
    """The real server and its clients, which have joined."""
    names = [f"learner-{number}" for number in range(case.learners)]
    config = SyncConfig.model_validate({"codec": case.codec, "bulk_connections": case.connections})
    server = start_server(folder, make_plan(folder, learners=names, target=ROUND_SAMPLES * 100, config=config))
    layout = Layout.from_shapes({"weights": [case.parameters]})
    learners = [Sender(server, name, layout=layout, case=case) for name in names]
    try:
        for learner in learners:
            learner.join()
        yield server, learners
    finally:
        for learner in learners:
            learner.client.close()
        server.kill()


@dataclass
class Sender:
    """A real client that sends a fixed displacement in each round."""

    server: Server
    name: str
    layout: Layout
    case: Case

    def __post_init__(self) -> None:
        self.client = SyncClient(
            self.server.control, bulk=self.server.bulk, run=self.server.plan.run, learner=self.name, layout=self.layout,
            codec=self.case.codec, connections=self.case.connections, bytes_per_second=self.case.link / 8,
        )  # fmt: skip
        self.generation, self.seq, self.version = 0, 0, 0
        self.delta: Floats = np.full(self.layout.total, 1e-3, np.float32)

    def join(self) -> None:
        found = self.client.register(contract_hash(self.server.plan), world_size=1)
        self.generation = found.generation
        if found.seed_needed:
            self.client.put_seed(self.delta, generation=self.generation, ema=self.delta)
        self.client.wait_version(0)

    def round(self) -> None:
        self.seq += 1
        receipt = self.client.put_part(
            self.delta, ema=self.delta, ranges=self.layout.whole, generation=self.generation, seq=self.seq, rank=0
        )
        contribution = Contribution(
            learner=self.name, generation=self.generation, seq=self.seq, base_version=self.version, steps=1,
            samples=ROUND_SAMPLES, cursor=self.seq * ROUND_SAMPLES, parts=[receipt], codec=self.case.codec,
            fingerprint=self.layout.fingerprint,
        )  # fmt: skip
        verdict = self.client.commit(contribution)
        assert verdict.kind == "merged", verdict
        self.version = verdict.version
        self.client.fetch(verdict.version)


def all_cases() -> list[Case]:
    """The grid that the tables are cut from."""
    axes = itertools.product((2, 4, 8, 16), SIZES, LINKS, TRIPS, CODECS, ("barrier", "decoupled"))
    return [
        Case(
            learners=learners, parameters=size * BILLION, link=link * 1e9, round_trip=trip, mode=mode, codec=codec,
            ranks=8 * size,
        )
        for learners, size, link, trip, codec, mode in axes
    ]  # fmt: skip


def forecast(case: Case, machine: Machine) -> dict[str, Any]:
    """One point of the grid: with one syncer, and with as many as keep up."""
    parts = divide(case, machine, busy=BUSY)
    must, peak = hold(case)
    return {
        **asdict(case),
        "parts": parts,
        "must_hold_gb": must / 1e9,
        "peak_gb": peak / 1e9,
        "one": asdict(simulate(case, machine)),
        "divided": asdict(simulate(replace(case, parts=parts), machine)),
    }


def write_tables(grid: list[dict[str, Any]], *, machine: Machine, points: list[dict[str, Any]]) -> str:
    """Markdown: sizes by links, then numbers of learners and codecs, then the check of the model."""

    def row(name: str, **wanted: Any) -> str:
        return _row(name, *(_pick(grid, mode=mode, **wanted) for mode in ("barrier", "decoupled")))

    titles = (
        "{}", "round trip", "syncers", "barrier: sync, s", "blocked", "decoupled: sync, s", "blocked",
        "one syncer: barrier, s", "decoupled blocked", "memory, GB",
    )  # fmt: skip
    head = f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}"
    lines = ["4 learners, bf16, 100 inner steps of 1 s:", "", head.format("parameters, link")]
    for size, link, trip in itertools.product(SIZES, LINKS, TRIPS):
        wanted = {"parameters": size * BILLION, "link": link * 1e9, "round_trip": trip}
        lines.append(row(f"{size}B, {link} Gbit/s", learners=4, codec="bf16", **wanted))
    lines += ["", "7B parameters, links of 10 Gbit/s:", "", head.format("learners, codec")]
    for learners, codec in itertools.product((2, 4, 8, 16), CODECS):
        wanted = {"parameters": 7 * BILLION, "link": 10e9, "round_trip": TRIPS[-1]}
        lines.append(row(f"{learners}, {codec}", learners=learners, codec=codec, **wanted))
    lines += ["", "The model against the real syncer and real clients, over loopback with limited links:", ""]
    lines += ["| run | predicted, s | measured, s | error |", "| --- | --- | --- | --- |"]
    for one in points:
        name = f"{one['parameters'] / 1e6:.0f}M, {one['learners']} learners, {one['codec']}"
        name += f", {one['link'] / 1e6:,.0f} Mbit/s"
        figures = f"{one['predicted_seconds']:.2f} | {one['measured_seconds']:.2f} | {one['error']:+.0%}"
        lines.append(f"| {name} | {figures} |")
    rates = (
        f"merge {machine.merge / 1e6:.0f}M elements/s of 4 learners, sha256 {machine.digest / 1e9:.1f} GB/s, "
        f"disk {machine.disk / 1e9:.1f} GB/s"
    )
    lines += ["", f"One core as measured by this run and used above: {rates}."]
    return "\n".join(lines) + "\n"


def _pick(grid: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(row for row in grid if all(row[name] == value for name, value in wanted.items()))


def _row(name: str, barrier: dict[str, Any], decoupled: dict[str, Any]) -> str:
    first, second = barrier["divided"], decoupled["divided"]
    cells = (
        name, f"{barrier['round_trip'] * 1000:.0f} ms", f"{barrier['parts']}, {decoupled['parts']}",
        f"{first['sync_seconds']:,.0f}", f"{first['blocked_share']:.1%}",
        f"{second['sync_seconds']:,.0f}", f"{second['blocked_share']:.1%}",
        f"{barrier['one']['sync_seconds']:,.0f}", f"{decoupled['one']['blocked_share']:.1%}",
        f"{barrier['must_hold_gb']:,.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def rate_of(action: Callable[[], object], *, clock: Callable[[], float] = time.thread_time) -> float:
    """Elements per second, the best of several on warm memory."""
    action()
    seconds: list[float] = []
    for _ in range(5):
        started = clock()
        action()
        seconds.append(clock() - started)
    return MEASURED / min(seconds)


if __name__ == "__main__":
    main()
