"""Large tensors between two processes of one machine: written once into memory that both see, and read where they lie.

Each side of a connection makes one arena for what it sends. Only its maker gives out regions, so nothing is shared but
bytes: the other side maps it, reads, and says when it is done with a region. An arena has no name in any file system,
so nothing of it is left behind by processes that were killed; it is opened through /proc, which the kernel allows only
to processes of the same user that see each other. Where that fails (other machines, other pods) tensors travel as
frames, and nobody but this module notices.

A message whose tensors lie in an arena begins with an envelope, a frame that no msgpack document can be: where each
tensor lies, and the number of its region. The number also stands in front of the region itself, so a region that was
reused too early is found and not read.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from storage.memory import SEALS, sealed_memory

LARGE_BYTES = 1 << 16
"""Messages whose tensors are smaller together travel as frames."""
ARENA_BYTES = 256 << 20
"""Of one connection and direction. Memory is taken by what is really written."""
ENVELOPE = 0xC1
"""First byte of an envelope; msgpack never uses it."""
_ALIGN = 64
_COUNT = struct.Struct("<BxH")
_PLACE = struct.Struct("<QQQ")
_NUMBER = struct.Struct("<Q")
_NAME = "gkr-arena"


class ArenaError(Exception):
    """What the other side says of its arena cannot be."""


class ArenaAddress(NamedTuple):
    """By which another process opens an arena."""

    pid: int
    descriptor: int
    inode: int
    """Tells whether it is still the same file."""
    size: int
    nonce: int
    """What its first bytes hold: on another machine the same numbers may name another file."""


@dataclass(frozen=True)
class Place:
    """One region: the number of its use, and where its bytes are."""

    number: int
    offset: int
    size: int


class SendArena:
    """The arena of one connection for what this side sends. Not thread-safe: used under the connection's own lock."""

    def __init__(self, size: int = ARENA_BYTES) -> None:
        """OSError where there is no anonymous shared memory."""
        self._file = sealed_memory(_NAME, size=size)
        try:
            self._map = mmap.mmap(self._file, size)
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self._view = np.frombuffer(self._map, dtype=np.uint8)
        self._nonce = secrets.randbits(53)
        _NUMBER.pack_into(self._map, 0, self._nonce)
        self._free: list[tuple[int, int]] = [(_ALIGN, size - _ALIGN)]
        """(offset, size) of free stretches, by offset, never adjacent."""
        self._used: dict[int, tuple[int, int]] = {}
        """Region by number."""
        self._next = 1
        self.size = size

    @property
    def address(self) -> ArenaAddress:
        """For the other side."""
        return ArenaAddress(os.getpid(), self._file, os.fstat(self._file).st_ino, self.size, self._nonce)

    @property
    def used(self) -> int:
        """Regions that the other side has not given back."""
        return len(self._used)

    def write(self, frames: Sequence[bytes | bytearray | memoryview]) -> list[Place] | None:
        """Copy the frames into one region each; none if they do not fit now, and then nothing was written."""
        places: list[Place] = []
        for frame in frames:
            place = self._take(len(frame))
            if place is None:
                for one in places:
                    self.release(one.number)
                return None
            places.append(place)
        for place, frame in zip(places, frames, strict=True):
            _NUMBER.pack_into(self._map, place.offset - _ALIGN, place.number)
            if place.size:
                self._view[place.offset : place.offset + place.size] = np.frombuffer(frame, dtype=np.uint8)
        return places

    def release(self, number: int) -> None:
        """The other side is done with a region. A number that is not in use is ignored: it was released before."""
        region = self._used.pop(number, None)
        if region is None:
            return
        at = bisect.bisect_left(self._free, region)
        offset, size = region
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            before, more = self._free[at - 1]
            self._free[at - 1] = (before, more + size)
        else:
            self._free.insert(at, (offset, size))

    def close(self) -> None:
        """Give the memory back; the other side keeps what it has mapped until it lets go of it."""
        self._view = np.empty(0, dtype=np.uint8)
        self._map.close()
        os.close(self._file)

    def _take(self, size: int) -> Place | None:
        needed = _ALIGN + -(-max(size, 1) // _ALIGN) * _ALIGN
        for index, (offset, free) in enumerate(self._free):
            if free >= needed:
                if free == needed:
                    del self._free[index]
                else:
                    self._free[index] = (offset + needed, free - needed)
                number, self._next = self._next, self._next + 1
                self._used[number] = (offset, needed)
                return Place(number, offset + _ALIGN, size)
        return None


class ReadArena:
    """The other side's arena, mapped for reading."""

    def __init__(self, address: ArenaAddress) -> None:
        """OSError or ArenaError if it cannot be reached, which means: ask for frames."""
        file = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            name = str(Path(f"/proc/self/fd/{file}").readlink())
            if not name.startswith(f"/memfd:{_NAME}") or found.st_ino != address.inode:
                raise ArenaError(f"descriptor {address.descriptor} of process {address.pid} is {name}")
            if found.st_uid != os.getuid() or found.st_size != address.size or not address.size:
                raise ArenaError(f"the arena belongs to user {found.st_uid} and has {found.st_size} bytes")
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ArenaError("the arena could be cut off while it is read")
            self._map = mmap.mmap(file, address.size, prot=mmap.PROT_READ)
            if _NUMBER.unpack_from(self._map)[0] != address.nonce:
                raise ArenaError("the arena is another one")
        finally:
            os.close(file)
        self.size = address.size

    def read(self, place: Place) -> memoryview:
        """The bytes of a region, where they lie. ArenaError if it is not the region that was announced."""
        if place.offset < 2 * _ALIGN or place.offset + place.size > self.size or place.offset % _ALIGN:
            raise ArenaError(f"a region of {place.size} bytes at {place.offset} is not in an arena of {self.size}")
        (number,) = _NUMBER.unpack_from(self._map, place.offset - _ALIGN)
        if number != place.number:
            raise ArenaError(f"region {place.number} is {number} by now")
        return memoryview(self._map)[place.offset : place.offset + place.size]


def pack_envelope(places: Sequence[Place]) -> bytes:
    """The first frame of a message whose tensors lie in an arena."""
    parts = [_COUNT.pack(ENVELOPE, len(places))]
    return b"".join([*parts, *(_PLACE.pack(one.number, one.offset, one.size) for one in places)])


def is_envelope(frame: bytes | bytearray | memoryview) -> bool:
    """Whether a first frame is one."""
    return len(frame) > 0 and frame[0] == ENVELOPE


def unpack_envelope(frame: bytes | bytearray | memoryview, *, most: int) -> list[Place]:
    """Where the tensors lie. ArenaError for anything that `pack_envelope` does not write."""
    if len(frame) < _COUNT.size:
        raise ArenaError(f"an envelope of {len(frame)} bytes")
    _, count = _COUNT.unpack_from(frame)
    if not 1 <= count <= most or len(frame) != _COUNT.size + count * _PLACE.size:
        raise ArenaError(f"an envelope of {len(frame)} bytes for {count} tensors")
    return [Place(*_PLACE.unpack_from(frame, _COUNT.size + index * _PLACE.size)) for index in range(count)]
