"""Claim: a merge moves its bytes at 60 % or more of the speed of a plain copy of the same bytes, in the same run, and
the syncer's memory stays within twice the bytes that it must hold.

Bytes of a merge: every contribution in its wire form, and the parts of the outer state that this kind of merge reads
and writes (barrier: weights and momentum; a decoupled window that does not fill a round: weights and accumulator).
The copy moves as many bytes with one call. Rounds alternate between the two, and the median of the rounds' ratios
counts; with one thread both are timed in time of the core, so that others on the machine do not count.
The memory is the peak resident set of a process of its own that holds outer state and four learners' displacements and
EMA displacements of 100M elements, and merges and averages them.
Run `python -m benchmarks.sync_merge`; writes benchmarks/results/sync_merge.json.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from training.sync.codec import Codec, encode, encoded_bytes
from training.sync.layout import Floats
from training.sync.merge import Displacement, MergeRules, average_models, merge
from training.sync.outer import OuterState, Spare
from training.sync.pieces import Part, Parts, Raised

ELEMENTS, LEARNERS, ROUNDS = 32 << 20, 4, 9
MEMORY_ELEMENTS = 100_000_000
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")
RULES = MergeRules(learning_rate=0.7, momentum=0.9, round_samples=100)
RESULTS = Path(__file__).parent / "results" / "sync_merge.json"


def main() -> None:
    """Measure, print, write; with `memory CODEC` only the process whose memory is measured."""
    if sys.argv[1:2] == ["memory"]:
        hold_and_merge(next(one for one in CODECS if one == sys.argv[2]))
        return
    threads = min(os.cpu_count() or 1, 8)
    rows = [
        compare(codec, frac=frac, threads=count) for codec in CODECS for frac in (1.0, 0.25) for count in {1, threads}
    ]
    print(f"{'codec':6} {'merge':9} {'threads':>7} {'GB/s':>6} {'copy':>6} {'ratio':>6} {'best':>6} {'s per 1e9':>9}")
    for row in rows:
        print(
            f"{row['codec']:6} {row['merge']:9} {row['threads']:7d} {row['gb_per_second']:6.1f} "
            f"{row['copy_gb_per_second']:6.1f} {row['ratio']:6.2f} {row['best_ratio']:6.2f} "
            f"{row['seconds_per_billion']:9.2f}"
        )
    codecs = [speed_of(codec) for codec in CODECS]
    print(f"{'codec':6} {'bytes':>6} {'encode GB/s of float32':>23} {'error':>8}")
    for row in codecs:
        print(f"{row['codec']:6} {row['bytes_share']:6.3f} {row['encode_gb_per_second']:23.1f} {row['error']:8.2%}")
    memory = [measure_memory(codec) for codec in CODECS]
    for row in memory:
        print(
            f"memory, {MEMORY_ELEMENTS / 1e6:.0f}M elements, {LEARNERS} learners, {row['codec']}: holds "
            f"{row['must_hold_gb']:.2f} GB, peak {row['peak_gb']:.2f} GB, {row['ratio']:.2f} times"
        )
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
    results = {"machine": machine, "elements": ELEMENTS, "learners": LEARNERS, "rows": rows, "codecs": codecs}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results | {"memory": memory}, indent=1) + "\n")


def compare(codec: Codec, *, frac: float, threads: int) -> dict[str, Any]:
    """Merge and copy, round by round in turn."""
    displacements = [give(name, codec, count=ELEMENTS) for name in names()]
    outer, spare = OuterState.start(draw(0, ELEMENTS)), Spare()
    size = LEARNERS * encoded_bytes(ELEMENTS, codec) + 4 * 4 * ELEMENTS  # two arrays of the state read, two written
    sources, targets = draw(1, size // 8), np.zeros(size // 8, np.float32)
    clock = time.thread_time if threads == 1 else time.perf_counter
    rates: list[float] = []
    copy_rates: list[float] = []
    for round_number in range(ROUNDS + 2):
        results: list[OuterState] = []
        seconds = seconds_of(
            lambda results=results: results.append(
                merge(outer, displacements, rules=RULES, frac=frac, spare=spare, threads=threads).outer
            ),
            clock=clock,
        )
        # The same merge again and again, on warm memory.
        spare.give(results[0].theta, results[0].momentum if frac == 1 else results[0].accumulated)
        copy_seconds = seconds_of(lambda: np.copyto(targets, sources), clock=clock)
        if round_number >= 2:
            rates.append(size / seconds / 1e9)
            copy_rates.append(size / copy_seconds / 1e9)
    return {
        "codec": codec,
        "merge": "barrier" if frac == 1 else "decoupled",
        "threads": threads,
        "gb_per_second": statistics.median(rates),
        "copy_gb_per_second": statistics.median(copy_rates),
        "ratio": statistics.median(one / other for one, other in zip(rates, copy_rates, strict=True)),
        "best_ratio": max(rates) / max(copy_rates),
        "seconds_per_billion": size / statistics.median(rates) / ELEMENTS,
    }


def speed_of(codec: Codec) -> dict[str, Any]:
    """What encoding costs a learner, and what it loses."""
    values = draw(3, ELEMENTS) * np.float32(1e-3)
    out = encode(values, codec, out=np.zeros(encoded_bytes(ELEMENTS, codec), np.uint8))
    seconds = min(seconds_of(lambda: encode(values, codec, out=out)) for _ in range(5))
    part = Parts([Part(data=out, ranges=[(0, ELEMENTS)], codec=codec)], start=0, length=ELEMENTS)
    decoded = part.read(0, 1 << 20, np.empty(1 << 20, np.float32)).astype(np.float64)
    exact = values[: 1 << 20].astype(np.float64)
    return {
        "codec": codec,
        "bytes_share": out.nbytes / values.nbytes,
        "encode_gb_per_second": values.nbytes / seconds / 1e9,
        "error": float(np.linalg.norm(decoded - exact) / np.linalg.norm(exact)),
    }


def measure_memory(codec: Codec) -> dict[str, Any]:
    """Peak of a process of its own, less what an interpreter with numpy takes by itself."""
    command = [sys.executable, "-m", "benchmarks.sync_merge", "memory", codec]
    done = subprocess.run(command, check=True, capture_output=True, timeout=300)
    peak = float(done.stdout)
    must_hold = 3 * 4 * MEMORY_ELEMENTS + 2 * LEARNERS * encoded_bytes(MEMORY_ELEMENTS, codec)
    return {"codec": codec, "must_hold_gb": must_hold / 1e9, "peak_gb": peak / 1e9, "ratio": peak / must_hold}


def hold_and_merge(codec: Codec) -> None:
    """Receive (write) four contributions, merge them, average the EMA weights; print the peak."""
    outer = OuterState.start(np.full(MEMORY_ELEMENTS, 0.5, np.float32))
    outer.momentum[:], outer.accumulated[:] = 0, 0
    deltas = [give(name, codec, count=MEMORY_ELEMENTS, flat=True) for name in names()]
    averages = [
        (
            one.learner,
            Raised(base=outer.theta, displacement=give("", codec, count=MEMORY_ELEMENTS, flat=True).delta),
            100,
        )
        for one in deltas
    ]
    result = merge(outer, deltas, rules=RULES)
    model = average_models(averages, round_samples=100)
    assert len(model) == len(result.outer.theta)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def names() -> list[str]:
    return [f"learner-{number}" for number in range(LEARNERS)]


def give(learner: str, codec: Codec, *, count: int, flat: bool = False) -> Displacement:
    """A contribution as it came over the wire; `flat`: the same bytes everywhere, made without more memory."""
    if flat:
        wire = np.full(encoded_bytes(count, codec), 0, np.uint8)
        wire += 0  # really written
    else:
        wire = np.array(encode(draw(len(learner) + ord(learner[-1]), count), codec))
    part = Part(data=wire, ranges=[(0, count)], codec=codec)
    return Displacement(learner=learner, delta=Parts([part], start=0, length=count), samples=100)


def draw(seed: int, count: int) -> Floats:
    """Random values; those of a million are repeated."""
    piece = np.random.default_rng(seed).standard_normal(1 << 20, dtype=np.float32)
    return np.resize(piece, count)


def seconds_of(action: Callable[[], object], *, clock: Callable[[], float] = time.thread_time) -> float:
    started = clock()
    action()
    return clock() - started


if __name__ == "__main__":
    main()
