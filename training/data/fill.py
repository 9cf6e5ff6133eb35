"""Copies the shards that this node reads much of, beside the loader and ahead of it.

A learner's order is a permutation of each whole dataset, so any stretch of it touches nearly all shards alike; none is
finished before the others. So shards do not come and go in turn: what decides is how much of a shard this node reads.
A shard is copied when what has been read of it since the start, and what the next HORIZON samples of the learner will
read, is WHOLE_SHARE of it for this node: a dataset that is small beside the horizon at once, one that many nodes go
through once never, and anything in between when it has been found out which of both it is like.
If a dataset does not fit, the part of it that does is copied and stays as long as loaders read the dataset; the rest is
read by range all the time. What cannot be copied is no error here: whoever reads a sample meets the same problem, and
tells which one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spec.errors import DataError, GkrError
from storage.cache import Cache, StoppedError
from storage.errors import NoRoomError
from storage.shard_files import AGAIN_SECONDS, Origin, ShardFile
from storage.uris import open_bucket
from training.data.contents import SourceFiles
from training.data.plan import WINDOW, Refs

WHOLE_SHARE = 0.25
"""Between the share from which a copy takes less time (0.13 for images of 40 KB, `benchmarks.data_cache`) and the one
from which it takes fewer bytes (1)."""
HORIZON = WINDOW
_STEP = 1 << 15
_TICK_SECONDS = 1.0
_END_SECONDS = 5.0
_log = logging.getLogger(__name__)


class _Source(NamedTuple):
    origin: Origin
    shards: tuple[ShardFile, ...]
    first: int
    """Row of the split's first sample, counted over all shards."""
    ends: NDArray[np.int64]
    counts: NDArray[np.int64]
    """Samples of the learner that lie in each shard, up to where it has looked."""


class Filler:
    """A thread of the rank, from the first `advance` on. `close` ends it, and a copy that is under way."""

    def __init__(
        self,
        sources: Sequence[SourceFiles],
        *,
        refs: Callable[[NDArray[np.int64]], Refs],
        position: int,
        share: float,
    ) -> None:
        """`refs`: samples at places of the learner's order. `share`: of each batch that this node's ranks take."""
        self._sources = {number: _opened(one) for number, one in enumerate(sources) if one.origin is not None}
        self._refs, self._share = refs, share
        self._position = self._looked = position
        self._settled: set[str] = set()
        """Digests of shards that are here, or cannot be had from their bucket."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def advance(self, position: int) -> None:
        """The loader is there now."""
        self._position = position
        if self._sources and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="loader-fill", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End soon; what was copied stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def worth_copying(self) -> list[tuple[Origin, ShardFile]]:
        """The shards of which this node reads so much, those that it reads most of first."""
        found: list[tuple[float, Origin, ShardFile]] = []
        for one in self._sources.values():
            shares = one.counts * self._share / np.diff(one.ends, prepend=0)
            found += [(-shares[n], one.origin, one.shards[n]) for n in np.flatnonzero(shares >= WHOLE_SHARE)]
        found.sort(key=lambda one: one[0])
        return [(origin, shard) for _, origin, shard in found if shard.sha256 not in self._settled]

    def look_ahead(self) -> None:
        """Count what the samples until the horizon lie in."""
        while self._looked < self._position + HORIZON and not self._stop.is_set():
            refs = self._refs(np.arange(self._looked, self._looked + _STEP, dtype=np.int64))
            for number, one in self._sources.items():
                rows = one.first + refs.sample[refs.source == number]
                one.counts[:] += np.bincount(np.searchsorted(one.ends, rows, side="right"), minlength=len(one.ends))
            self._looked += _STEP

    def _run(self) -> None:
        with contextlib.suppress(StoppedError):
            while not self._stop.is_set():
                self.look_ahead()
                self._stop.wait(_TICK_SECONDS if self._copy_all() else AGAIN_SECONDS)

    def _copy_all(self) -> bool:
        """Copy what is worth it; whether that was possible."""
        for origin, shard in self.worth_copying():
            if self._stop.is_set():
                break
            try:
                self._copy(origin, shard)
            except NoRoomError as error:
                _log.info("the rest of the dataset is read where it is: %s", error.message)
                return False
            except DataError as error:
                _log.warning("%s", error)
                self._settled.add(shard.sha256)
            except GkrError as error:  # away, refused, or written anew just now: all of them may pass
                _log.warning("%s", error)
                return False
        return True

    def _copy(self, origin: Origin, shard: ShardFile) -> None:
        cache, bucket = Cache(Path(origin.cache)), open_bucket(origin.bucket)
        found = cache.fetch(shard.wanted, bucket=bucket, optional=True, stop=self._stop.is_set)
        if found is not None:  # else another process is at it
            os.close(found)
            self._settled.add(shard.sha256)


def _opened(files: SourceFiles) -> _Source:
    assert files.origin is not None
    ends = np.cumsum([one.samples for one in files.shards])
    return _Source(files.origin, files.shards, files.first_row, ends, np.zeros(len(ends), dtype=np.int64))
