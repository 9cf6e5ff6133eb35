"""The minute of benchmarks that runs in CI: short trials, and bounds that only a real regression breaks.

The bounds are on ratios and on counts, far below what is measured on a quiet machine, because CI's machine is neither
quiet nor always the same. A benchmark that misses one is run again: noise passes at the second or third try, a
regression at none.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._verdicts import read_verdicts, sentence, show

ATTEMPTS = 3
DEADLINE_SECONDS = 120


@dataclass(frozen=True)
class Bound:
    """What a row must hold: on its ratio if it has one, else on its measured value."""

    what: str
    at_least: float = float("-inf")
    at_most: float = float("inf")

    def broken_by(self, rows: Sequence[dict[str, Any]]) -> str:
        """In words; empty if it holds."""
        row = next((row for row in rows if row["what"] == self.what), None)
        if row is None:
            return f"{self.what}: not measured"
        value = row["measured"] if row["ratio"] is None else row["ratio"]
        if self.at_least <= value <= self.at_most:
            return ""
        return f"{sentence(row)}; here it has to be from {show(self.at_least)} to {show(self.at_most)}"


@dataclass(frozen=True)
class Quick:
    """A benchmark in its short form."""

    name: str
    arguments: tuple[str, ...]
    bounds: tuple[Bound, ...]


SUBSET: tuple[Quick, ...] = (
    Quick(
        "services_transport",
        ("--seconds", "0.2", "--trials", "3", "--sizes", "1KB", "16MB", "--without-ray"),
        (
            Bound("1 KB, 1 outstanding, of bare", at_least=0.15),
            Bound("1 KB, 4 outstanding, of bare", at_least=0.08),
            Bound("16 MB, one copy, 4 outstanding", at_least=0.1),
        ),
    ),
    Quick(
        "service_fairness",
        ("--seconds", "1.5", "--trials", "1", "--without-ray", "--loads", "flood", "equals"),
        (
            Bound("quiet median under a flood, of one queue's", at_most=0.3),
            Bound("equal shares of 8 ranks (Jain)", at_least=0.9),
        ),
    ),
    Quick(
        "service_ranks",
        ("--ranks", "256", "--seconds", "2", "--trials", "1"),
        (
            Bound("256 ranks, 1 KB, per second of the replica's CPU", at_least=0.07),
            Bound("256 ranks, 1 KB, smallest share of a rank", at_least=0.5),
        ),
    ),
    Quick(
        "service_stall",
        ("--requests", "8", "--trials", "1", "--without-bare"),
        (
            Bound("growth under a stalled replica, one machine", at_most=1.2),
            Bound("growth under a stalled replica, two machines", at_most=1.2),
        ),
    ),
)
"""Bounds hold even on two cores that ten others use; growth is not a matter of speed."""


def main(names: Sequence[str]) -> int:
    """Run the subset, or those of it that are named; 0 if every bound held at some try."""
    broken: list[str] = []
    for one in SUBSET:
        if not names or one.name in names:
            broken += attempts(one)
    for words in broken:
        print(f"broken: {words}", file=sys.stderr)
    return 1 if broken else 0


def attempts(one: Quick) -> list[str]:
    """What the last try broke."""
    broken: list[str] = []
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="gkr-bench-") as folder:
            output = Path(folder) / f"{one.name}.json"
            command = [sys.executable, "-m", f"benchmarks.{one.name}", *one.arguments, "--output", str(output)]
            done = subprocess.run(command, check=False, timeout=DEADLINE_SECONDS)
            if done.returncode:
                return [f"{one.name} ended with {done.returncode}"]
            rows = read_verdicts(output)
        broken = [words for bound in one.bounds if (words := bound.broken_by(rows))]
        if not broken:
            return []
    return broken
