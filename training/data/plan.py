"""What every batch of a learner consists of: a pure function of sources, weights, buckets and seed.

The mixed order of all sources (`training.data.mixture`, `training.data.order`) is a stream. With one bucket a batch is
simply the next samples of the stream. With several, the stream is cut into windows: inside a window samples are grouped
by bucket, behind those that the window before left over; whole batches are cut, and shuffled; what does not fill a
batch is carried into the next window. So every batch has one size of image, on all ranks, and no sample is dropped.

Positions count samples in batches from the start of the run, steps count batches. Where a window begins (its number,
position and step, and the stream places that were carried) is all the state there is; a plan finds any position from
any such start before it.
World size, workers, prefetch and time never enter. numpy only: loader workers import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from training.data.mixture import Mixture
from training.data.order import sample_ids

WINDOW = 1 << 18
_BLOCK = 1 << 12
_WINDOW_BATCHES = 16
"""Batches that a window of several buckets has at least, so that few samples are carried."""
_MARK_BYTES = 5
"""Of a batch's mark: the sum over 8,192 ranks is still exact in a float64."""
KEPT_STARTS = 8
"""Starts of windows that a checkpoint holds: a learner that goes back does so by a few rounds, not by windows."""


@dataclass(frozen=True)
class Source:
    """One dataset as the plan sees it."""

    digest: str
    """Of its manifest, and of the table that gives each sample its bucket if there is one."""
    samples: int
    buckets: NDArray[np.integer] | None = None
    """Number of the bucket of each sample; none if there is one bucket."""


@dataclass(frozen=True)
class Refs:
    """Which samples; arrays of one length."""

    source: NDArray[np.int64]
    sample: NDArray[np.int64]
    """Row in the source."""
    epoch: NDArray[np.int64]
    """How often the source was gone through before."""

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> Refs:
        return Refs(self.source[rows], self.sample[rows], self.epoch[rows])


@dataclass(frozen=True)
class Start:
    """Where a window begins."""

    window: int
    position: int
    carry: tuple[int, ...] = ()
    """Places of the stream that the window before left over, in bucket order."""
    step: int = 0
    """Batches before it."""

    def to_json(self) -> list[Any]:
        """For a checkpoint."""
        return [self.window, self.position, list(self.carry), self.step]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        """From a checkpoint."""
        window, position, carry, step = value
        return cls(int(window), int(position), tuple(int(one) for one in carry), int(step))


@dataclass(frozen=True)
class Batch:
    """One batch of the learner."""

    position: int
    bucket: int
    refs: Refs
    mark: int = 0
    """Equal for equal batches of equal plans, and hardly ever else: ranks add theirs up to see that they are at one."""


@dataclass(frozen=True)
class _Window:
    start: Start
    after: Start
    places: NDArray[np.int64]
    """Stream places in the order of the batches."""
    refs: Refs
    """The samples at these places."""
    firsts: NDArray[np.int64]
    """Where in `places` each batch begins, and behind the last the end."""
    buckets: NDArray[np.int64]
    """Of each batch."""


class Plan:
    """All batches of one learner. Not thread-safe: it keeps what it worked on last."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        mixture: Mixture,
        seed: int,
        learner: str,
        batches: Sequence[int],
        window: int = WINDOW,
        starts: Sequence[Start] = (),
    ) -> None:
        """`batches`: samples of a batch, for each bucket. `starts`: known starts of windows, from a checkpoint."""
        if mixture.sources != len(sources):
            raise ValueError(f"{mixture.sources} weights for {len(sources)} sources")
        if min(batches) < 1 or window < max(batches):
            raise ValueError(f"batches of {list(batches)} samples in windows of {window}")
        self._sources, self._mixture, self._seed, self._learner = tuple(sources), mixture, seed, learner
        self._batches, self._size = np.array(batches, dtype=np.int64), window
        self._starts = {one.window: one for one in (Start(0, 0), *starts)}
        self._current: _Window | None = None
        self._block = Batch(0, 0, self.refs(np.empty(0, dtype=np.int64)))
        """With one bucket: some batches one behind the other, found at once because that costs little more than one."""

    @cached_property
    def digest(self) -> str:
        """Names everything that decides the order; equal digests mean equal batches."""
        text = [f"plan/1\0{self._seed}\0{self._learner}\0{self._size}\0{self._batches.tolist()}"]
        text += [f"{one.digest}\0{one.samples}" for one in self._sources]
        text += [f"{one.start}\0{list(one.weights)}" for one in self._mixture.segments]
        return blake2b("\1".join(text).encode(), digest_size=16).hexdigest()

    def batch(self, position: int) -> Batch:
        """The batch that begins at a position; ValueError if none begins there.

        With one bucket a batch may begin anywhere: a run that goes on with another size of batch needs no more.
        """
        if len(self._batches) == 1:
            size = int(self._batches[0])
            first = position - self._block.position
            if not 0 <= first <= len(self._block.refs) - size:
                places = np.arange(position, position + max(1, _BLOCK // size) * size, dtype=np.int64)
                self._block, first = Batch(position, 0, self.refs(places)), 0
            return self._marked(position, 0, self._block.refs[first : first + size])
        window = self._window_of(position)
        number = int(np.searchsorted(window.firsts, position - window.start.position))
        if window.firsts[number] != position - window.start.position:
            raise ValueError(f"no batch begins at position {position}")
        rows = slice(int(window.firsts[number]), int(window.firsts[number + 1]))
        return self._marked(position, int(window.buckets[number]), window.refs[rows])

    def step(self, position: int) -> int:
        """How many batches come before the one that begins at a position."""
        if len(self._batches) == 1:
            return position // int(self._batches[0])
        window = self._window_of(position)
        return window.start.step + int(np.searchsorted(window.firsts, position - window.start.position))

    def starts(self, position: int) -> list[Start]:
        """What a checkpoint at a position holds: the starts of its window and of some before it, as far as known."""
        known = sorted(one.window for one in self._starts.values() if one.position <= position)
        return [self._starts[one] for one in known[-KEPT_STARTS:]] if len(self._batches) > 1 else []

    def _marked(self, position: int, bucket: int, refs: Refs) -> Batch:
        named = blake2b(f"{self.digest} {position} {bucket}".encode(), digest_size=_MARK_BYTES)
        for part in (refs.source, refs.sample, refs.epoch):
            named.update(part.tobytes())
        return Batch(position, bucket, refs, int.from_bytes(named.digest(), "little"))

    def _window_of(self, position: int) -> _Window:
        if position < 0:
            raise ValueError(f"position {position} lies before the first")
        found = self._current
        if found is None or not found.start.position <= position < found.after.position:
            # The nearest known start before the position; windows from there on are made one after the other.
            start = max((one for one in self._starts.values() if one.position <= position), key=lambda one: one.window)
            found = self._make(start)
            while found.after.position <= position:
                found = self._make(found.after)
            self._current = found
        return found

    def _make(self, start: Start) -> _Window:
        fresh = np.arange(start.window * self._size, (start.window + 1) * self._size, dtype=np.int64)
        places = np.concatenate([np.array(start.carry, dtype=np.int64), fresh])
        refs = self.refs(places)
        codes = self._codes(refs)
        # Stable, so that inside a bucket what was carried comes first and the stream keeps its order.
        order = np.argsort(codes, kind="stable")
        places, refs, codes = places[order], refs[order], codes[order]
        counts = np.bincount(codes, minlength=len(self._batches))
        whole = counts // self._batches
        begins = np.concatenate([[0], np.cumsum(counts)[:-1]])
        number = np.repeat(np.arange(len(counts)), whole)
        inside = np.arange(len(number)) - np.repeat(np.cumsum(whole) - whole, whole)
        shuffle = self._shuffle(start.window, len(number))
        number, inside = number[shuffle], inside[shuffle]
        sizes = self._batches[number]
        firsts = np.concatenate([[0], np.cumsum(sizes)])
        index = np.repeat(begins[number] + inside * sizes - firsts[:-1], sizes) + np.arange(firsts[-1])
        used = np.zeros(len(places), dtype=np.bool_)
        used[index] = True
        after = Start(
            start.window + 1,
            start.position + int(firsts[-1]),
            tuple(places[~used].tolist()),
            start.step + len(number),
        )
        self._starts[after.window] = after
        for one in [one for one in self._starts if 0 < one <= after.window - 2 * KEPT_STARTS]:
            del self._starts[one]
        return _Window(start=start, after=after, places=places[index], refs=refs[index], firsts=firsts, buckets=number)

    def _codes(self, refs: Refs) -> NDArray[np.int16]:
        codes = np.empty(len(refs), dtype=np.int16)  # numpy sorts these by radix, ten times as fast as int64
        for number, source in enumerate(self._sources):
            own = refs.source == number
            codes[own] = 0 if source.buckets is None else source.buckets[refs.sample[own]]
        return codes

    def refs(self, places: NDArray[np.int64]) -> Refs:
        """The samples at places of the stream. Safe to call from any thread."""
        sources, indices = self._mixture.at(places)
        samples, epochs = np.empty_like(places), np.empty_like(places)
        for number, source in enumerate(self._sources):
            own = sources == number
            if own.any():
                positions = indices[own]
                epochs[own] = positions // source.samples
                samples[own] = sample_ids(
                    source.digest, n=source.samples, seed=self._seed, learner=self._learner, positions=positions
                )
        return Refs(sources, samples, epochs)

    def _shuffle(self, window: int, count: int) -> NDArray[np.int64]:
        if not count:
            return np.empty(0, dtype=np.int64)
        key = f"batches of window {window}"
        positions = np.arange(count, dtype=np.int64)
        return sample_ids(key, n=count, seed=self._seed, learner=self._learner, positions=positions)


def window_of(samples: int, *, batch: int) -> int:
    """How many samples a window has: an epoch, within bounds. `batch`: the largest one.

    In a window of many epochs of a small dataset these would be shuffled into each other.
    """
    return min(WINDOW, max(samples, _WINDOW_BATCHES * batch))


def rank_slice(count: int, *, rank: int, world_size: int) -> slice:
    """The rows of a batch that a rank takes: as even as can be, the first ranks one more. ValueError if some get none.

    The mean over the batch is that of all rows whoever takes them, so any world size gives the same steps.
    """
    if count < world_size:
        raise ValueError(f"a batch of {count} samples cannot be shared by {world_size} ranks; make batches larger")
    base, more = divmod(count, world_size)
    first = rank * base + min(rank, more)
    return slice(first, first + base + (rank < more))
