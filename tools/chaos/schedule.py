"""Which faults come when, by the seed; and how long each kept somebody from working. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill learner", "stop learner", "partition", "kill syncer"]
KINDS: tuple[Kind, ...] = ("kill learner", "stop learner", "partition", "kill syncer")
_FIRST, _LAST = 0.1, 0.6
"""Shares of the fault-free run's time between which faults come. Late ones might come after the end: the run with
faults can be the quicker one where others use the machine too."""
_LASTS_SECONDS = (1.0, 3.0)


@dataclass(frozen=True)
class Fault:
    """One injection."""

    at: float
    """Seconds after the start of the run."""
    kind: Kind
    learner: str
    """Empty for the syncer."""
    lasts: float
    """Seconds that a stop or a partition takes."""


def make_schedule(seed: int, *, learners: Sequence[str], seconds: float, each: int) -> list[Fault]:
    """`each` faults of every kind, spread evenly over a run of about `seconds`, in random order on random learners."""
    draw = random.Random(seed)
    kinds: list[Kind] = [kind for kind in KINDS for _ in range(each)]
    draw.shuffle(kinds)
    slot = (_LAST - _FIRST) * seconds / len(kinds)
    return [
        Fault(
            at=_FIRST * seconds + (index + draw.random() * 0.5) * slot,
            kind=kind,
            learner="" if kind == "kill syncer" else draw.choice(list(learners)),
            lasts=draw.uniform(*_LASTS_SECONDS),
        )
        for index, kind in enumerate(kinds)
    ]


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Length of time that lies in at least one of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
