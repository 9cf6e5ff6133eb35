"""Which source the sample at a position comes from: weighted sources, mixed evenly, with no state but the weights.

With integer weights w over W = sum(w), every prefix of the order holds of each source a number of samples that differs
from the exact share by less than one. This is the fair schedule of Baruah, Cohen, Plaxton and Varvel (Proportionate
progress, 1996) for one processor: the j-th sample of a source may come from position floor((j-1) W/w) on and must come
before ceil(j W/w); the earliest deadline goes first, which always fits because the shares sum to one. The schedule
repeats after W positions, so any position is found in constant time. World size, workers and prefetch never enter.

Weights may change while a run goes on: each change is a segment that begins at a position, and sources go on where
their last segment left them. numpy only: loader workers import this module.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 1 << 20
"""Largest sum of weights after division by their common factor: the schedule of one period is kept in memory."""


@dataclass(frozen=True)
class Segment:
    """Weights from one position of the order on."""

    start: int
    weights: tuple[int, ...]
    """One per source, at least 0; 0 leaves the source out."""


class Mixture:
    """The order of sources. `at` is a pure function of its segments."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Segments by start, the first at 0; raises ValueError for weights that cannot be."""
        _check(segments)
        self.segments = tuple(segments)
        self._starts = np.array([one.start for one in segments], dtype=np.int64)
        self._cycles = [_cycle(_reduced(one.weights)) for one in segments]
        # How many samples of each source come before each segment.
        self._before = [np.zeros(len(segments[0].weights), dtype=np.int64)]
        for number, one in enumerate(segments[1:]):
            self._before.append(self._before[-1] + self._cycles[number].counts(one.start - segments[number].start))

    @property
    def sources(self) -> int:
        """Number of sources."""
        return len(self.segments[0].weights)

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, index in the source's own endless order) of each position; both like `positions`."""
        number = np.searchsorted(self._starts, positions, side="right") - 1
        sources, indices = np.empty_like(positions), np.empty_like(positions)
        for one in np.unique(number):
            chosen = number == one
            found, ranks = self._cycles[one].at(positions[chosen] - self._starts[one])
            sources[chosen], indices[chosen] = found, ranks + self._before[one][found]
        return sources, indices

    def counts(self, position: int) -> NDArray[np.int64]:
        """Samples of each source before a position."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._before[number] + self._cycles[number].counts(position - int(self._starts[number]))


@dataclass(frozen=True)
class _Cycle:
    """One period of the schedule."""

    sources: NDArray[np.int64]
    """Source at each place of the period."""
    ranks: NDArray[np.int64]
    """How many samples of the same source come before that place in the period."""
    weights: NDArray[np.int64]

    def at(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        periods, rest = np.divmod(places, len(self.sources))
        found = self.sources[rest]
        return found, periods * self.weights[found] + self.ranks[rest]

    def counts(self, places: int) -> NDArray[np.int64]:
        periods, rest = divmod(places, len(self.sources))
        return periods * self.weights + np.bincount(self.sources[:rest], minlength=len(self.weights))


@lru_cache(maxsize=16)
def _cycle(weights: tuple[int, ...]) -> _Cycle:
    period = sum(weights)
    if sum(1 for one in weights if one) == 1:
        only = next(index for index, one in enumerate(weights) if one)
        sources = np.full(period, only, dtype=np.int64)
    else:
        sources = np.array(_schedule(weights), dtype=np.int64)
    ranks = np.empty(period, dtype=np.int64)
    for source, weight in enumerate(weights):
        ranks[sources == source] = np.arange(weight)
    return _Cycle(sources=sources, ranks=ranks, weights=np.array(weights, dtype=np.int64))


def _schedule(weights: tuple[int, ...]) -> list[int]:
    """Source at each of sum(weights) places: earliest deadline first among the samples that may come already."""
    period = sum(weights)
    # (release, source, j) of each source's next sample that may not come yet; (deadline, source, j) of those that may.
    waiting = [(0, source, 1) for source, weight in enumerate(weights) if weight]
    ready: list[tuple[int, int, int]] = []
    found: list[int] = []
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            _, source, j = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-j * period // weights[source]), source, j))
        _, source, j = heapq.heappop(ready)
        found.append(source)
        if j < weights[source]:
            heapq.heappush(waiting, (j * period // weights[source], source, j + 1))
    return found


def _reduced(weights: tuple[int, ...]) -> tuple[int, ...]:
    factor = math.gcd(*weights)
    return tuple(one // factor for one in weights)


def _check(segments: Sequence[Segment]) -> None:
    if not segments or segments[0].start != 0:
        raise ValueError("a mixture begins at position 0")
    sources = len(segments[0].weights)
    for before, after in itertools.pairwise(segments):
        if after.start <= before.start:
            raise ValueError(f"weights from position {after.start} come after those from {before.start}")
    for one in segments:
        if len(one.weights) != sources:
            raise ValueError(f"{len(one.weights)} weights from position {one.start}, {sources} sources")
        if min(one.weights) < 0 or not any(one.weights):
            raise ValueError(f"weights {list(one.weights)} from position {one.start}: at least 0, and one above")
        if sum(_reduced(one.weights)) > LONGEST_PERIOD:
            raise ValueError(
                f"weights {list(one.weights)} repeat only after {sum(_reduced(one.weights))} samples, at most"
                f" {LONGEST_PERIOD}; round them"
            )
