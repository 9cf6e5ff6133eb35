"""Samples of one split by index, read where they lie and verified as they are read.

A shard is checked once, when it is first touched: its length, its digest (whole, up to HASHED_BYTES; a larger one
relies on its header's and index's checksums), its index. Each record is checked against its own CRC-32 at every read,
so damage that happens later is met too. Records are read by position and never mapped: a file truncated under a
running job gives an error, not a bus error. Of a shard that is read by range (`storage.shard_files`) header, index and
records are checked, the whole is not. Standard library only: loader workers import this module.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TypeVar

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
from storage.protocol import Bytes
from storage.shard_files import HASHED_BYTES, OPEN_SHARDS, ShardFile, ShardFiles

_CHUNK = 2**20
_T = TypeVar("_T")


class SplitReader:
    """Random access to the samples of a list of shards."""

    def __init__(self, files: ShardFiles, *, shape: Shape) -> None:
        self._files = files
        self._shape = shape
        self._ends = list(accumulate(shard.samples for shard in files.shards))
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Sample:
        number, inside = self._place(index)
        return self._renewing(number, lambda: self._shard(number).read(inside))

    def expect(self, indices: Iterable[int]) -> None:
        """Told which samples will be read next."""
        self._files.expect([self._span(*self._place(index)) for index in indices])

    def close(self) -> None:
        """Close all files."""
        self._open.clear()
        self._files.close()

    def _place(self, index: int) -> tuple[int, int]:
        """Number of the shard, and of the sample in it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def _span(self, number: int, inside: int) -> tuple[int, int, int]:
        """Number of the shard, offset and bytes of the sample's record."""
        return number, *self._renewing(number, lambda: self._shard(number).span(inside))

    def _renewing(self, number: int, read: Callable[[], _T]) -> _T:
        """What `read` gives; once more, if the shard is a copy that turns out damaged."""
        try:
            return read()
        except DataError:
            if not self._files.renew(number):
                raise
            self._open.pop(number, None)
            return read()

    def _shard(self, number: int) -> _OpenShard:
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = _OpenShard(self._files, number, shape=self._shape)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return shard


class _OpenShard:
    def __init__(self, files: ShardFiles, number: int, *, shape: Shape) -> None:
        self._files, self._number = files, number
        self._path = files.shards[number].path
        self._shape = shape
        self._index = self._verify(files.shards[number])

    def span(self, number: int) -> tuple[int, int]:
        """Offset and bytes of a record."""
        entry = self._index[number]
        return entry.offset, entry.size

    def read(self, number: int) -> Sample:
        entry = self._index[number]
        data = bytes(self._pread(entry.size, offset=entry.offset))
        return unpack_record(data, entry=entry, shape=self._shape, where=self._path)

    def _verify(self, shard: ShardFile) -> list[Entry]:
        size = self._files.size(self._number)
        if size != shard.bytes:
            raise DataError(
                f"the shard has {size} bytes, the manifest says {shard.bytes}", where=self._path, hint=REMEDY
            )
        if size <= HASHED_BYTES and self._files.is_whole(self._number):
            self._verify_digest(shard)
        head = unpack_head(bytes(self._pread(HEADER_BYTES, offset=0)), where=self._path)
        if head.shape != self._shape or head.count != shard.samples:
            raise DataError(
                "the shard has another image shape or sample count than its manifest", where=self._path, hint=REMEDY
            )
        data = bytes(self._pread(head.records_at - HEADER_BYTES, offset=HEADER_BYTES))
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

    def _pread(self, size: int, *, offset: int) -> Bytes:
        return self._files.read(self._number, offset=offset, size=size)
