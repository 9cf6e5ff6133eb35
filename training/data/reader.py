"""Samples of one split by index, read where they lie and verified as they are read.

A shard is checked once, when it is first touched: its length, its digest (whole, up to HASHED_BYTES; a larger one
relies on its header's and index's checksums), its index. Each record is checked against its own CRC-32 at every read,
so damage that happens later is met too. Records are read by position and never mapped: a file truncated under a
running job gives an error, not a bus error. At most OPEN_SHARDS descriptors are held. Standard library only: loader
workers import this module.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from spec.errors import DataError
from spec.shard_bytes import (
    HEADER_BYTES,
    REMEDY,
    Entry,
    Sample,
    Shape,
    unpack_head,
    unpack_index,
    unpack_record,
)

HASHED_BYTES = 64 * 2**20
OPEN_SHARDS = 64
_CHUNK = 2**20


@dataclass(frozen=True)
class ShardFile:
    """A shard as the manifest names it, with its absolute path."""

    path: str
    samples: int
    bytes: int
    sha256: str


class SplitReader:
    """Random access to the samples of a list of shards."""

    def __init__(self, shards: Sequence[ShardFile], *, shape: Shape) -> None:
        self._shards = list(shards)
        self._shape = shape
        self._ends = list(accumulate(shard.samples for shard in shards))
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        return self._shard(number).read(index - first)

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def _shard(self, number: int) -> _OpenShard:
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = _OpenShard(self._shards[number], shape=self._shape)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return shard


class _OpenShard:
    def __init__(self, shard: ShardFile, *, shape: Shape) -> None:
        self._path = shard.path
        self._shape = shape
        try:
            self._file = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise DataError("a shard of the dataset does not exist", where=shard.path, hint=REMEDY) from error
        except OSError as error:
            raise _unreadable(shard.path, error) from error
        try:
            self._index = self._verify(shard)
        except DataError:
            self.close()
            raise

    def read(self, number: int) -> Sample:
        entry = self._index[number]
        data = self._pread(entry.size, offset=entry.offset)
        return unpack_record(data, entry=entry, shape=self._shape, where=self._path)

    def close(self) -> None:
        os.close(self._file)

    def _verify(self, shard: ShardFile) -> list[Entry]:
        size = os.fstat(self._file).st_size
        if size != shard.bytes:
            raise DataError(
                f"the shard has {size} bytes, the manifest says {shard.bytes}", where=self._path, hint=REMEDY
            )
        if size <= HASHED_BYTES:
            self._verify_digest(shard)
        head = unpack_head(self._pread(HEADER_BYTES, offset=0), where=self._path)
        if head.shape != self._shape or head.count != shard.samples:
            raise DataError(
                "the shard has another image shape or sample count than its manifest", where=self._path, hint=REMEDY
            )
        data = self._pread(head.records_at - HEADER_BYTES, offset=HEADER_BYTES)
        return unpack_index(data, head=head, where=self._path)

    def _verify_digest(self, shard: ShardFile) -> None:
        digest = hashlib.sha256()
        for offset in range(0, shard.bytes, _CHUNK):
            digest.update(self._pread(min(_CHUNK, shard.bytes - offset), offset=offset))
        if digest.hexdigest() != shard.sha256:
            raise DataError(
                f"the shard is corrupt: sha256 {digest.hexdigest()[:12]}, the manifest says {shard.sha256[:12]}",
                where=self._path,
                hint=REMEDY,
            )

    def _pread(self, size: int, *, offset: int) -> bytes:
        try:
            return os.pread(self._file, size, offset)
        except OSError as error:
            raise _unreadable(self._path, error) from error


def shard_files(folder: Path, shards: Sequence[tuple[str, int, int, str]]) -> tuple[ShardFile, ...]:
    """Shards of a manifest that lies in `folder`, given as (path, samples, bytes, sha256)."""
    return tuple(ShardFile(str(folder / path), samples, size, sha256) for path, samples, size, sha256 in shards)


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(
        f"a shard of the dataset cannot be read: {error.strerror}", where=path, hint="check the disk and permissions"
    )
