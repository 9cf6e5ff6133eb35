"""From the contributions of a round to the next shared weights: one function for both modes (cross-region.md 8.3).

Promises that the result depends on the contributions only, never on the order in which they arrived nor on the number
of threads: sums run in the order of the learners' names, in float32, over a fixed grid of pieces. Weights are capped at
one normal round, so that a learner that carries several rounds cannot drown the others. Every contribution is read
once, in its wire form; besides the two states a merge needs a few pieces per thread.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from training.sync.outer import OuterState, OuterStep, Spare
from training.sync.pieces import Array, Source, read_piece

PIECE = 1 << 16
"""Elements at a time; a few pieces fit the cache of a core."""
_LOOKED_AT = 16
"""Pieces from which cosines are estimated; all of them up to a million elements."""
_MOST_THREADS = 8

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Displacement:
    """One learner's contribution to a merge."""

    learner: str
    delta: Source
    """Learner's weights minus the shared weights it started from: an array, or its wire form (`pieces.Parts`)."""
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
    """The next outer state and what is worth knowing about how it came to be.

    Cosines of more than a million elements are estimates from evenly spread pieces.
    """

    outer: OuterState
    gradient_norm: float
    """Not finite if the merged weights are not."""
    cosine: float | None
    """Lowest between two displacements; none for a single one."""
    mean_cosine: float | None = None
    momentum_cosine: float | None = None
    """Between the outer gradient and the former momentum; none while there is no momentum."""


def weigh(samples: int, *, rules: MergeRules) -> float:
    """Weight of a contribution inside its round."""
    return 1.0 if rules.weighting == "uniform" else float(min(samples, rules.round_samples))


def discount(staleness: int, *, rules: MergeRules) -> float:
    """Absolute discount for a stale base; not renormalised, or it would do nothing for a single contribution."""
    if staleness <= rules.soft_staleness:
        return 1.0
    return 1.0 / math.sqrt(1 + staleness - rules.soft_staleness)


def merge(
    outer: OuterState,
    displacements: Sequence[Displacement],
    *,
    rules: MergeRules,
    frac: float = 1.0,
    trainable: int | None = None,
    spare: Spare | None = None,
    threads: int | None = None,
) -> MergeResult:
    """Merge the contributions of one round (`frac` = 1) or of one window (`Round.share`) to a fragment.

    `trainable`: elements, from the first on, that the outer optimizer moves (default: all); the others are buffers and
    move by the weighted mean. `threads`: default one per core, at most 8; the result is the same for any number.
    """
    ordered = sorted(displacements, key=lambda one: one.learner)
    _check(outer, ordered)
    weights = [weigh(one.samples, rules=rules) for one in ordered]
    shares = [
        discount(one.staleness, rules=rules) * weight / sum(weights)
        for one, weight in zip(ordered, weights, strict=True)
    ]
    step = OuterStep(outer, learning_rate=rules.learning_rate, momentum=rules.momentum, frac=frac, spare=spare)
    # The sign is turned here and nowhere else: the outer gradient points from the learner back to its base.
    mean = _Mean([one.delta for one in ordered], [-share for share in shares])
    cut = len(outer.theta) if trainable is None else trainable
    grid = [(place, True) for place in _grid(0, cut)] + [(place, False) for place in _grid(cut, len(outer.theta))]
    every = max(1, len(grid) // _LOOKED_AT)
    squares = np.zeros(len(grid))
    products = np.zeros((-(-len(grid) // every), len(ordered) + 2, len(ordered) + 2))

    def work(indices: range) -> None:
        rooms = mean.make_rooms(outer.theta.dtype)
        for index in indices:
            place, trains = grid[index]
            looked_at = index % every == 0
            gradient, room, seen = mean.read(place, rooms, keep=looked_at)
            squares[index] = np.dot(gradient, gradient)
            if looked_at:
                _multiply_pairs([*seen, gradient, outer.momentum[place]], out=products[index // every])
            if trains:
                step.move(place, gradient, room)
            else:
                step.move_buffers(place, gradient)

    _in_threads(work, count=len(grid), threads=threads)
    lowest, average, momentum = _cosines(products.sum(axis=0), learners=len(ordered))
    return MergeResult(
        outer=step.state,
        gradient_norm=math.sqrt(float(squares.sum())),
        cosine=lowest,
        mean_cosine=average,
        momentum_cosine=momentum,
    )


def average_models(
    averages: Sequence[tuple[str, Source, int]],
    *,
    round_samples: int,
    out: Array | None = None,
    threads: int | None = None,
) -> Array:
    """The published model: mean of the learners' EMA weights by samples, capped like in a merge. No outer optimizer.

    A learner's weights are an array, or `pieces.Raised` if they came as a displacement. A single learner's keep every
    bit.
    """
    ordered = sorted(averages, key=lambda one: one[0])
    weights = [min(samples, round_samples) for _, _, samples in ordered]
    mean = _Mean([source for _, source, _ in ordered], [weight / sum(weights) for weight in weights])
    first = ordered[0][1]
    dtype = first.dtype if isinstance(first, np.ndarray) else np.dtype(np.float32)
    result = np.empty(len(first), dtype) if out is None else out
    grid = _grid(0, len(first))

    def work(indices: range) -> None:
        rooms = mean.make_rooms(dtype)
        for index in indices:
            result[grid[index]] = mean.read(grid[index], rooms)[0]

    _in_threads(work, count=len(grid), threads=threads)
    return result


def follow(average: Array, theta: Array, *, decay: float, out: Array | None = None) -> Array:
    """The syncer's own EMA over versions; `decay`, the share of the average that stays, is beta ** (inner steps)."""
    result = np.empty_like(average) if out is None else out
    for place in _grid(0, len(average)):
        piece = np.subtract(theta[place], average[place])
        piece *= 1 - decay
        np.add(average[place], piece, out=result[place])
    return result


def measure_norm(source: Source) -> float:
    """Euclidean norm, pieces summed in float64; not finite if any element is not."""
    total = 0.0
    room = np.empty(PIECE, np.float32)
    for place in _grid(0, len(source)):
        piece = read_piece(source, place.start, place.stop, room[: place.stop - place.start])
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(piece, piece))
        if not math.isfinite(square):  # too large for float32, or really not finite
            wide = piece.astype(np.float64)
            square = float(np.dot(wide, wide))
        total += square
    return math.sqrt(total)


class _Mean:
    """Sum of share x source, read in pieces.

    The largest share is taken out of the sum, so that the usual equal shares cost one multiplication, not one each.
    Sources are added in pairs, (first + second) + (third + fourth) + ..., which reads memory faster than one by one.
    """

    def __init__(self, sources: Sequence[Source], shares: Sequence[float]) -> None:
        self._scale = max(shares, key=abs)
        self._terms = [(source, share / self._scale) for source, share in zip(sources, shares, strict=True)]

    def make_rooms(self, dtype: np.dtype[Any]) -> list[Array]:
        """A thread's own memory: sum, scratch, and a piece for each source."""
        return [np.empty(PIECE, dtype) for _ in range(2 + len(self._terms))]

    def read(self, place: slice, rooms: Sequence[Array], *, keep: bool = False) -> tuple[Array, Array, list[Array]]:
        """The sum of a piece, scratch of the same size, and the sources' pieces up to a factor, valid if `keep`."""
        total, scratch, *rest = [room[: place.stop - place.start] for room in rooms]
        seen: list[Array] = []
        so_far = total
        for first in range(0, len(self._terms), 2):
            for number in range(first, min(first + 2, len(self._terms))):
                (source, factor), room = self._terms[number], rest[number if keep else number % 2]
                piece = read_piece(source, place.start, place.stop, room)
                seen.append(piece if factor == 1 else np.multiply(piece, factor, out=room))
            pair = seen[first]
            if len(seen) > first + 1:
                pair = np.add(pair, seen[first + 1], out=scratch if first else total)
            so_far = np.add(so_far, pair, out=total) if first else pair
        return np.multiply(so_far, self._scale, out=total), scratch, seen


def _check(outer: OuterState, ordered: Sequence[Displacement]) -> None:
    if not ordered:
        raise ValueError("a merge needs at least one contribution")
    names = [one.learner for one in ordered]
    if len(set(names)) < len(names):
        raise ValueError(f"a learner contributes twice: {names}")
    for one in ordered:
        if len(one.delta) != len(outer.theta):
            raise ValueError(f"learner {one.learner} contributes {len(one.delta)} elements to {len(outer.theta)}")
        if one.samples < 1:
            raise ValueError(f"learner {one.learner} contributes {one.samples} samples; it has nothing to contribute")


def _grid(start: int, stop: int) -> list[slice]:
    return [slice(first, min(first + PIECE, stop)) for first in range(start, stop, PIECE)]


def _in_threads(work: Callable[[range], None], *, count: int, threads: int | None) -> None:
    """Divide `count` pieces among threads; numpy computes without the interpreter's lock."""

    def calm(indices: range) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # the norm tells
            work(indices)

    number = min(threads or min(os.cpu_count() or 1, _MOST_THREADS), count)
    if number < 2:
        calm(range(count))
        return
    with ThreadPoolExecutor(number) as pool:
        for _ in pool.map(calm, [range(first, count, number) for first in range(number)]):
            pass


def _multiply_pairs(vectors: Sequence[Array], *, out: Sums) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(vectors)), 2):
        out[first, second] = np.dot(vectors[first], vectors[second])


def _cosines(products: Sums, *, learners: int) -> tuple[float | None, float | None, float | None]:
    """Lowest and mean between learners, and of the gradient with the momentum; the last two vectors are these."""

    def cosine(first: int, second: int) -> float:
        scale = math.sqrt(products[first, first]) * math.sqrt(products[second, second])
        return float(products[first, second]) / scale if scale else 0.0

    pairs = [cosine(*pair) for pair in itertools.combinations(range(learners), 2)]
    momentum = cosine(learners, learners + 1) if products[learners + 1, learners + 1] else None
    return (min(pairs), sum(pairs) / len(pairs), momentum) if pairs else (None, None, momentum)
