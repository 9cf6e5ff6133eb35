"""From the contributions of a round to the next shared weights: one function for both modes (cross-region.md 8.3).

Promises that the result depends on the contributions only, never on the order in which they arrived: sums run in the
order of the learners' names, in float32. Weights are capped at one normal round, so that a learner that carries
several rounds cannot drown the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from training.sync.outer import OuterState, outer_step

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Displacement:
    """One learner's contribution to a merge."""

    learner: str
    delta: npt.NDArray[Any]
    """Learner's weights minus the shared weights it started from."""
    samples: int
    staleness: int = 0
    """Versions merged since the learner's base."""


@dataclass(frozen=True, kw_only=True)
class MergeRules:
    """Settings of the outer optimizer and of the weighting."""

    learning_rate: float
    momentum: float
    round_samples: int
    weighting: Literal["samples", "uniform"] = "samples"
    soft_staleness: int = 0
    """Staleness up to which a contribution counts in full. Barrier merges never see any."""


@dataclass(frozen=True, kw_only=True)
class MergeResult:
    """The next outer state and what is worth knowing about how it came to be."""

    outer: OuterState
    gradient_norm: float
    cosine: float | None
    """Lowest between two displacements; none for a single one."""


def weigh(samples: int, *, rules: MergeRules) -> float:
    """Weight of a contribution inside its round."""
    return 1.0 if rules.weighting == "uniform" else float(min(samples, rules.round_samples))


def discount(staleness: int, *, rules: MergeRules) -> float:
    """Absolute discount for a stale base; not renormalised, or it would do nothing for a single contribution."""
    if staleness <= rules.soft_staleness:
        return 1.0
    return 1.0 / math.sqrt(1 + staleness - rules.soft_staleness)


def mean_by_weight(arrays: Sequence[npt.NDArray[Any]], shares: Sequence[float]) -> npt.NDArray[Any]:
    """Sum of share x array in the given order and the arrays' own dtype; a share of exactly 1 keeps every bit."""
    total = arrays[0] * shares[0]
    for array, share in zip(arrays[1:], shares[1:], strict=True):
        for start in range(0, len(total), _CHUNK):
            total[start : start + _CHUNK] += array[start : start + _CHUNK] * share
    return total


def measure_norm(array: npt.NDArray[Any]) -> float:
    """Euclidean norm, summed in float64; not finite if any element is not."""
    total = 0.0
    for start in range(0, len(array), _CHUNK):
        chunk = array[start : start + _CHUNK].astype(np.float64)
        total += float(chunk @ chunk)
    return math.sqrt(total)


def merge(
    outer: OuterState, displacements: Sequence[Displacement], *, rules: MergeRules, frac: float = 1.0
) -> MergeResult:
    """Merge the contributions of one round (`frac` = 1) or of one window (participants / active)."""
    if not displacements:
        raise ValueError("a merge needs at least one contribution")
    ordered = sorted(displacements, key=lambda one: one.learner)
    if len({one.learner for one in ordered}) < len(ordered):
        raise ValueError(f"a learner contributes twice: {[one.learner for one in ordered]}")
    weights = [weigh(one.samples, rules=rules) for one in ordered]
    total = sum(weights)
    # The sign is turned here and nowhere else: the outer gradient points from the learner back to its base.
    shares = [
        -discount(one.staleness, rules=rules) * weight / total for one, weight in zip(ordered, weights, strict=True)
    ]
    gradient = mean_by_weight([one.delta for one in ordered], shares)
    after = outer_step(outer, gradient, learning_rate=rules.learning_rate, momentum=rules.momentum, frac=frac)
    return MergeResult(outer=after, gradient_norm=measure_norm(gradient), cosine=_lowest_cosine(ordered))


def average_models(averages: Sequence[tuple[str, npt.NDArray[Any], int]], *, round_samples: int) -> npt.NDArray[Any]:
    """The published model: mean of the learners' EMA weights by samples, capped like in a merge. No outer optimizer."""
    ordered = sorted(averages, key=lambda one: one[0])
    weights = [min(samples, round_samples) for _, _, samples in ordered]
    return mean_by_weight([array for _, array, _ in ordered], [weight / sum(weights) for weight in weights])


def _lowest_cosine(displacements: Sequence[Displacement]) -> float | None:
    if len(displacements) < 2:
        return None
    norms = [measure_norm(one.delta) for one in displacements]
    cosines: list[float] = []
    for first, second in itertools.combinations(range(len(displacements)), 2):
        scale = norms[first] * norms[second]
        product = float(np.dot(displacements[first].delta, displacements[second].delta))
        cosines.append(product / scale if scale else 0.0)
    return min(cosines)
