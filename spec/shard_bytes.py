"""The bytes of one shard, and nothing else: what `spec.shards` promises, without pydantic.

Loader workers start by the hundred and read records with this module alone, so it must import only the standard
library. All numbers are little-endian:

    header   64 bytes   magic, version, channels, height, width, count, offset of the first record, total bytes,
                        CRC-32 of the index, 16 unused bytes, CRC-32 of the 60 bytes before it
    index    16 bytes   per sample: record offset (u64), record bytes (u32), CRC-32 of the record (u32)
    records             per sample: id (u64), label (u32), caption bytes (u32), pixels (uint8, height x width x
                        channels), caption (UTF-8)

Every length is checked against the bytes that are really there before it is used; every error names the place and says
what to do.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from spec.errors import DataError

MAGIC = b"GKRSHARD"
VERSION = 1
MAX_CAPTION_BYTES = 4096
REMEDY = (
    "remove what is there and prepare the dataset again: `gkr data prepare SOURCE --to URI`, or for a source that is"
    " built in `python -m services.prepare --source SOURCE --manifest URI`"
)

_HEADER = struct.Struct("<8sHHIIIQQI16xI")
_HEADER_CRC_AT = 60
_INDEX = struct.Struct("<QII")
_RECORD = struct.Struct("<QII")
HEADER_BYTES = _HEADER.size
INDEX_ENTRY_BYTES = _INDEX.size


@dataclass(frozen=True, slots=True)
class Shape:
    """Pixels of one image."""

    height: int
    width: int
    channels: int

    @property
    def pixels(self) -> int:
        """Bytes of one image."""
        return self.height * self.width * self.channels


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with what is known about it."""

    id: int
    """Number of the sample in its source; unique over all splits."""
    label: int
    caption: str
    pixels: bytes
    """uint8, rows from the top, channels last."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a record lies."""

    offset: int
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Head:
    """A shard's header."""

    shape: Shape
    count: int
    records_at: int
    total_bytes: int
    index_crc32: int


def pack_shard(samples: Sequence[Sample], *, shape: Shape) -> bytes:
    """All bytes of a shard; the same samples always give the same bytes."""
    records_at = HEADER_BYTES + INDEX_ENTRY_BYTES * len(samples)
    index, records, offset = bytearray(), bytearray(), records_at
    for sample in samples:
        record = _pack_record(sample, shape=shape)
        index += _INDEX.pack(offset, len(record), zlib.crc32(record))
        records += record
        offset += len(record)
    fields = (
        MAGIC,
        VERSION,
        shape.channels,
        shape.height,
        shape.width,
        len(samples),
        records_at,
        offset,
        zlib.crc32(index),
    )
    checksum = zlib.crc32(_HEADER.pack(*fields, 0)[:_HEADER_CRC_AT])
    return b"".join((_HEADER.pack(*fields, checksum), index, records))


def unpack_head(data: bytes | memoryview, *, where: str) -> Head:
    """Header of a shard from its first bytes."""
    if len(data) < HEADER_BYTES:
        _refuse(f"the shard has {len(data)} bytes, its header alone needs {HEADER_BYTES}: it is truncated", where=where)
    magic, version, channels, height, width, count, records_at, total, index_crc32, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        _refuse(f"not a shard: it begins with {bytes(magic)!r}, expected {MAGIC!r}", where=where)
    if version != VERSION:
        raise DataError(
            f"the shard has layout version {version}, this reader knows {VERSION}",
            where=where,
            hint="prepare the dataset with the code that trains on it, or update this code",
        )
    if zlib.crc32(data[:_HEADER_CRC_AT]) != checksum:
        _refuse("the shard's header is damaged (its CRC-32 does not match)", where=where)
    if records_at != HEADER_BYTES + INDEX_ENTRY_BYTES * count or total < records_at:
        _refuse(
            f"the shard's header contradicts itself: {count} samples, records at byte {records_at} of {total}",
            where=where,
        )
    return Head(Shape(height, width, channels), count, records_at, total, index_crc32)


def unpack_index(data: bytes | memoryview, *, head: Head, where: str) -> list[Entry]:
    """Places of all records, from the bytes between header and records."""
    want = INDEX_ENTRY_BYTES * head.count
    if len(data) != want:
        _refuse(f"the shard's index has {len(data)} of {want} bytes: it is truncated", where=where)
    if zlib.crc32(data) != head.index_crc32:
        _refuse("the shard's index is damaged (its CRC-32 does not match)", where=where)
    entries = [Entry(*fields) for fields in _INDEX.iter_unpack(data)]
    for number, entry in enumerate(entries):
        if entry.offset < head.records_at or entry.offset + entry.size > head.total_bytes:
            _refuse(
                f"record {number} lies at bytes {entry.offset}..{entry.offset + entry.size}, outside the shard",
                where=where,
            )
    return entries


def unpack_record(data: bytes | memoryview, *, entry: Entry, shape: Shape, where: str) -> Sample:
    """One sample from exactly the bytes its index entry names."""
    if len(data) != entry.size:
        _refuse(
            f"the record at byte {entry.offset} has {len(data)} of {entry.size} bytes: the shard is truncated",
            where=where,
        )
    if zlib.crc32(data) != entry.crc32:
        _refuse(f"the record at byte {entry.offset} is damaged (its CRC-32 does not match)", where=where)
    fixed = _RECORD.size + shape.pixels
    if entry.size < fixed:
        _refuse(
            f"the record at byte {entry.offset} has {entry.size} bytes, an image of this shape needs {fixed}",
            where=where,
        )
    identity, label, caption_bytes = _RECORD.unpack_from(data)
    if fixed + caption_bytes != entry.size:
        _refuse(
            f"the record at byte {entry.offset} says {caption_bytes} caption bytes, there are {entry.size - fixed}",
            where=where,
        )
    try:
        caption = str(data[fixed:], "utf-8")
    except UnicodeDecodeError:
        _refuse(f"the caption of the record at byte {entry.offset} is not UTF-8", where=where)
    return Sample(identity, label, caption, bytes(data[_RECORD.size : fixed]))


class ShardView:
    """A whole shard in memory, readable in any order."""

    def __init__(self, data: bytes | memoryview, *, where: str) -> None:
        self._data = memoryview(data)
        self._where = where
        self.head = unpack_head(self._data, where=where)
        if len(self._data) != self.head.total_bytes:
            _refuse(f"the shard has {len(self._data)} bytes, its header says {self.head.total_bytes}", where=where)
        self._index = unpack_index(self._data[HEADER_BYTES : self.head.records_at], head=self.head, where=where)

    def __len__(self) -> int:
        return self.head.count

    def __getitem__(self, number: int) -> Sample:
        entry = self._index[number]
        record = self._data[entry.offset : entry.offset + entry.size]
        return unpack_record(record, entry=entry, shape=self.head.shape, where=self._where)

    def __iter__(self) -> Iterator[Sample]:
        return (self[number] for number in range(len(self)))


def _pack_record(sample: Sample, *, shape: Shape) -> bytes:
    caption = sample.caption.encode("utf-8")
    if len(sample.pixels) != shape.pixels:
        raise DataError(
            f"sample {sample.id} has {len(sample.pixels)} pixel bytes, the dataset's shape needs {shape.pixels}"
        )
    if len(caption) > MAX_CAPTION_BYTES:
        raise DataError(
            f"the caption of sample {sample.id} has {len(caption)} bytes, at most {MAX_CAPTION_BYTES} are allowed"
        )
    return b"".join((_RECORD.pack(sample.id, sample.label, len(caption)), sample.pixels, caption))


def _refuse(message: str, *, where: str) -> NoReturn:
    raise DataError(message, where=where, hint=REMEDY)
