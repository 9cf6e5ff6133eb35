"""What becomes of samples that cannot be used: another takes their place by rule, they are counted, and too many stop
the run.

The rule needs no memory: at each position the candidates are a permutation of the samples of the same source and
bucket, keyed by the position, and the first one that can be used is taken. Whether a sample is damaged is a property of
the dataset, so every rank, world size and restart finds the same replacement. What can pass (a network that is away) is
no reason for quarantine; it is tried again and then an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spec.errors import DataError
from training.data.order import sample_ids
from training.data.plan import Source

_CHUNK = 4096


@dataclass(frozen=True)
class Bad:
    """One sample that was replaced."""

    position: int
    """In the learner's order."""
    source: int
    sample: int
    reason: str
    """A word for programs: truncated, checksum, bomb, mode, caption, ..."""
    replacement: int


@dataclass(frozen=True)
class Limits:
    """How much damage is too much."""

    in_a_row: int = 100
    """Positions one after the other."""
    share: float = 0.02
    """Of the last `window` samples of a rank."""
    window: int = 10_000
    least: int = 50
    """Bad samples before the share means anything."""


def candidates(source: Source, *, sample: int, position: int, seed: int, learner: str) -> Iterator[int]:
    """Samples that may stand at a position in place of a bad one, each once, in the order in which they are tried."""
    buckets = source.buckets
    for first in range(0, source.samples, _CHUNK):
        places = np.arange(first, min(first + _CHUNK, source.samples), dtype=np.int64)
        key = f"{source.digest} reserve {position}"
        found = sample_ids(key, n=source.samples, seed=seed, learner=learner, positions=places)
        if buckets is not None:
            found = found[buckets[found] == buckets[sample]]
        yield from (one for one in found.tolist() if one != sample)


class Quarantine:
    """One rank's count of what it delivered and what it replaced."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._recent: deque[tuple[int, int]] = deque()
        """(samples, bad) of the last batches, about a window."""
        self._samples = self._bad = 0
        self._row = 0
        self.reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, bad: list[Bad], *, first: int, count: int, where: str) -> None:
        """Book one delivered batch of positions [first, first + count); DataError if there is too much damage."""
        hit = {one.position for one in bad}
        self._row = self._row if hit else 0
        for position in range(first, first + count) if hit else ():
            self._row = self._row + 1 if position in hit else 0
            if self._row >= self._limits.in_a_row:
                raise self._too_much(f"{self._row} samples in a row cannot be used", where=where)
        for one in bad:
            self.reasons[one.reason] += 1
            self._examples.setdefault(one.reason, f"sample {one.sample} of source {one.source}")
        self._recent.append((count, len(bad)))
        self._samples, self._bad = self._samples + count, self._bad + len(bad)
        while len(self._recent) > 1 and self._samples - self._recent[0][0] >= self._limits.window:
            samples, some = self._recent.popleft()
            self._samples, self._bad = self._samples - samples, self._bad - some
        if self._bad >= self._limits.least and self._bad > self._limits.share * max(self._samples, self._limits.least):
            share = f"{self._bad} of the last {self._samples} samples cannot be used"
            raise self._too_much(f"{share}, more than {self._limits.share:.1%}", where=where)

    def _too_much(self, what: str, *, where: str) -> DataError:
        counts = [
            f"{count} {reason} (first: {self._examples[reason]})" for reason, count in self.reasons.most_common(5)
        ]
        return DataError(
            f"{what}: {', '.join(counts) or 'no single reason'}",
            where=where,
            hint="see what the dataset's storage or preparation did; `gkr data inspect` shows what is in it",
        )
