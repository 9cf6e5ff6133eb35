"""The shards of one dataset, read at random: where they lie, from the node's copies, or by range from their bucket.

A dataset on this machine is read in place. Of any other, a shard that has a copy is read from it, and the copy stays as
long as it is open here. One without is copied first if that takes one request; a larger one is read by range until
somebody (`training.data.fill`) has found that a copy pays. Either way the bytes are the same, so callers check them the
same way; a copy that turns out damaged is fetched again. At most OPEN_SHARDS descriptors and RANGES requests at a time.
Standard library only: loader workers import this module.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spec.errors import DataError
from storage.cache import Cache, Wanted
from storage.errors import MissingError, NoRoomError, answer_of, damaged_shard, missing_shard
from storage.protocol import PIECE_BYTES, Bucket, Bytes
from storage.uris import open_bucket

WHOLE_BYTES = PIECE_BYTES
"""A shard of at most so many bytes is copied rather than read by range: that takes one request too."""
AGAIN_SECONDS = 30.0
"""Until what could not be copied is tried again: to see that there is no room, all copies of a node are looked at."""
HASHED_BYTES = 64 * 2**20
"""A file of a dataset that is not larger is compared with its digest when it is opened."""
OPEN_SHARDS = 64
RANGES = 16
"""Requests for ranges under way at once in one process."""
RANGE_SECONDS = 300.0
"""A request's own deadlines end it before."""


@dataclass(frozen=True)
class ShardFile:
    """A shard as the manifest names it."""

    path: str
    """Where it lies, or its copy would."""
    samples: int
    bytes: int
    sha256: str
    key: str = ""
    """In the dataset's bucket."""

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.key, self.bytes, self.sha256)


@dataclass(frozen=True)
class Origin:
    """Where the shards of a dataset come from that is not on this machine. Travels to workers: plain values only."""

    bucket: str
    cache: str
    """Folder of the node's cache."""
    dataset: str
    """Digest of its manifest."""


def in_place(paths: Iterable[Path]) -> ShardFiles:
    """Shards on this machine of which nothing but the place is known."""
    return ShardFiles([ShardFile(str(path), samples=0, bytes=0, sha256="") for path in paths])


class ShardFiles:
    """Random access to the bytes of a list of shards. Not safe for several threads."""

    def __init__(self, shards: Sequence[ShardFile], *, origin: Origin | None = None) -> None:
        self.shards = list(shards)
        self._origin = origin
        self._open: OrderedDict[int, int] = OrderedDict()
        self._ranges: ThreadPoolExecutor | None = None
        self._coming: dict[tuple[int, int, int], Future[Bytes]] = {}
        self._use = -1
        self._full_until = 0.0

    def read(self, number: int, *, offset: int, size: int) -> Bytes:
        """Bytes of a shard; fewer, if its file ends before. DataError if it is not there."""
        coming = self._coming.pop((number, offset, size), None)
        if coming is not None:
            return answer_of(coming, seconds=RANGE_SECONDS, where=self.shards[number].path)
        descriptor = self._descriptor(number)
        if descriptor is None:
            return self._range(number, offset, size)
        try:
            return os.pread(descriptor, size, offset)
        except OSError as error:
            raise self._unreadable(number, error) from error

    def expect(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        """Begin to read (number, offset, size) by range where there is no copy; `read` takes what came.

        What was expected before and not read is forgotten.
        """
        self._forget()
        if self._origin is None:
            return
        for one in wanted:
            if one in self._coming or self._descriptor(one[0]) is not None:
                continue
            if self._ranges is None:
                self._ranges = ThreadPoolExecutor(RANGES, thread_name_prefix="ranges")
            self._coming[one] = self._ranges.submit(self._range, *one)

    def size(self, number: int) -> int:
        """Bytes of the shard's file as it is; of one that is read by range, as the manifest says."""
        descriptor = self._descriptor(number)
        return self.shards[number].bytes if descriptor is None else os.fstat(descriptor).st_size

    def is_whole(self, number: int) -> bool:
        """Whether it is read from a file."""
        return self._descriptor(number) is not None

    def renew(self, number: int) -> bool:
        """Told that its bytes are damaged: whether they came from a copy, which is gone now, and may be read again."""
        descriptor = self._open.pop(number, None)
        if descriptor is None:
            return False
        if self._origin is not None:
            self._cache.discard(self.shards[number].wanted, descriptor=descriptor)
        os.close(descriptor)
        return self._origin is not None

    def close(self) -> None:
        """Close all files."""
        self._forget()
        if self._ranges is not None:
            self._ranges.shutdown(wait=False)
            self._ranges = None
        while self._open:
            os.close(self._open.popitem()[1])
        if self._use >= 0:
            os.close(self._use)
            self._use = -1

    @cached_property
    def _cache(self) -> Cache:
        assert self._origin is not None
        cache = Cache(Path(self._origin.cache))
        self._use = cache.use(self._origin.dataset)
        return cache

    @cached_property
    def _bucket(self) -> Bucket:
        assert self._origin is not None
        return open_bucket(self._origin.bucket)

    def _forget(self) -> None:
        for future in self._coming.values():
            future.cancel()
        self._coming.clear()

    def _descriptor(self, number: int) -> int | None:
        found = self._open.get(number)
        if found is None:
            found = self._in_place(number) if self._origin is None else self._copy(self.shards[number].wanted)
            if found is None:
                return None
            self._open[number] = found
            if len(self._open) > OPEN_SHARDS:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(number)
        return found

    def _in_place(self, number: int) -> int:
        try:
            return os.open(self.shards[number].path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise missing_shard(self.shards[number].path) from error
        except OSError as error:
            raise self._unreadable(number, error) from error

    def _copy(self, one: Wanted) -> int | None:
        if one.bytes > WHOLE_BYTES or time.monotonic() < self._full_until:
            return self._cache.open(one)
        try:
            return self._cache.hold(one, bucket=self._bucket, optional=True)
        except NoRoomError:
            self._full_until = time.monotonic() + AGAIN_SECONDS
            return None

    def _range(self, number: int, offset: int, size: int) -> Bytes:
        try:
            data = self._bucket.read_range(self.shards[number].key, offset=offset, size=size)
        except MissingError as error:
            raise missing_shard(error.where) from error
        except DataError as error:
            raise damaged_shard(error) from error
        self._cache.count(range_reads=1, range_bytes=size)
        return data

    def _unreadable(self, number: int, error: OSError) -> DataError:
        return DataError(
            f"a shard of the dataset cannot be read: {error.strerror}",
            where=self.shards[number].path,
            hint="check the disk and permissions",
        )
