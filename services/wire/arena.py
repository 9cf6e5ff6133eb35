"""Large tensors between two processes of one machine: written once into memory that both see, and read where they lie.

Each side of a connection makes one arena for what it sends. Only its maker gives out regions, so nothing is shared but
bytes: the other side maps it, reads, and says when it is done with a region. A tensor that was computed into a region
is not copied at all. An arena has no name in any file system, so nothing of it is left behind by processes that were
killed; it is opened through /proc, which the kernel allows only to processes of the same user that see each other.
Where that fails (other machines, other pods) tensors travel as frames, and nobody but this module notices.

The first frame of a message whose tensors lie in an arena begins with an envelope, which no msgpack document can be:
where each tensor lies, and the number of its region. The number also stands in front of the region itself, so a region
that was reused too early is found and not read. Any message may carry in its envelope the numbers of regions of the
other side's arena that are read; so what is used again costs no message of its own.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections import deque
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
MAX_RELEASED = 1024
"""Regions in one envelope."""
ENVELOPE = 0xC1
"""First byte of an envelope; msgpack never uses it."""
_ALIGN = 64
_COUNT = struct.Struct("<BBH")
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


class Place(NamedTuple):
    """One region: the number of its use, and where its bytes are."""

    number: int
    offset: int
    size: int


@dataclass
class _Region:
    offset: int
    size: int
    ours: bool
    """Somebody on this side may still write to it, or send it again."""
    theirs: int
    """Times it was sent, less times the other side is done with it."""


class SendArena:
    """The arena of one connection for what this side sends. Written by one thread at a time; any may ask for room."""

    def __init__(self, size: int = ARENA_BYTES) -> None:
        """OSError where there is no anonymous shared memory."""
        self._file = sealed_memory(_NAME, size=size)
        try:
            self._map = mmap.mmap(self._file, size)
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self._view = np.frombuffer(self._map, dtype=np.uint8)
        self._begin = _address(self._view)
        self._nonce = secrets.randbits(53)
        _NUMBER.pack_into(self._map, 0, self._nonce)
        self._lock = threading.Lock()
        self._left: deque[Place] = deque()
        """Rooms that nobody on this side has any more. An array may be let go of anywhere, in here too, so whoever has
        the lock next deals with it."""
        self._free: list[tuple[int, int]] = [(_ALIGN, size - _ALIGN)]
        """(offset, size) of free stretches, by offset, never adjacent."""
        self._used: dict[int, _Region] = {}
        """By number."""
        self._at: dict[int, int] = {}
        """Number by where the bytes begin, of what was given out by `room`."""
        self._next = 1
        self._closed = False
        self.size = size

    @property
    def address(self) -> ArenaAddress:
        """For the other side."""
        return ArenaAddress(os.getpid(), self._file, os.fstat(self._file).st_ino, self.size, self._nonce)

    @property
    def used(self) -> int:
        """Regions that are not free."""
        with self._lock:
            self._settle()
            return len(self._used)

    def room(self, size: int) -> np.ndarray | None:
        """Bytes to compute a tensor into: sent from where they are, and free again when nobody has them any more."""
        with self._lock:
            self._settle()
            place = self._take(size, ours=True) if not self._closed else None
            if place is None:
                return None
            self._at[place.offset] = place.number
            # Not a view of our own array: whatever is made of it shall keep this one alive, and so the region.
            room = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=place.offset)
        weakref.finalize(room, self._left.append, place)
        return room

    def write(self, frames: Sequence[bytes | bytearray | memoryview]) -> list[Place] | None:
        """Copy the frames into one region each, except those that are in one; none if they do not fit now, and then
        nothing was written."""
        places: list[Place] = []
        with self._lock:
            self._settle()
            for frame in frames:
                place = self._placed(frame) or self._take(len(frame), ours=False)
                if place is None:
                    for one in places:
                        self._release(one.number)
                    return None
                self._used[place.number].theirs += 1
                places.append(place)
        for place, frame in zip(places, frames, strict=True):
            if place.size and not self._used[place.number].ours:
                self._view[place.offset : place.offset + place.size] = np.frombuffer(frame, dtype=np.uint8)
        return places

    def release(self, number: int) -> None:
        """The other side is done with a region. A number that it does not have is ignored: it was released before."""
        with self._lock:
            self._release(number)

    def close(self) -> None:
        """Give the memory back; the other side keeps what it has mapped until it lets go of it, this side its rooms."""
        with self._lock:
            self._closed = True
            self._view = np.empty(0, dtype=np.uint8)
            with contextlib.suppress(BufferError):
                self._map.close()
        os.close(self._file)

    def _release(self, number: int) -> None:
        region = self._used.get(number)
        if region is not None and region.theirs:
            region.theirs -= 1
            self._free_if_done(number, region)

    def _settle(self) -> None:
        while self._left:
            place = self._left.popleft()
            del self._at[place.offset]
            region = self._used[place.number]
            region.ours = False
            self._free_if_done(place.number, region)

    def _placed(self, frame: bytes | bytearray | memoryview) -> Place | None:
        """Where a frame is, if it is what `room` gave."""
        if not self._at or not len(frame):
            return None
        offset = _address(np.frombuffer(frame, dtype=np.uint8)) - self._begin
        number = self._at.get(offset)
        if number is None or len(frame) > self._used[number].size - _ALIGN:
            return None
        return Place(number, offset, len(frame))

    def _take(self, size: int, *, ours: bool) -> Place | None:
        needed = _ALIGN + -(-max(size, 1) // _ALIGN) * _ALIGN
        for index, (offset, free) in enumerate(self._free):
            if free >= needed:
                if free == needed:
                    del self._free[index]
                else:
                    self._free[index] = (offset + needed, free - needed)
                number, self._next = self._next, self._next + 1
                self._used[number] = _Region(offset, needed, ours, 0)
                _NUMBER.pack_into(self._map, offset, number)
                return Place(number, offset + _ALIGN, size)
        return None

    def _free_if_done(self, number: int, region: _Region) -> None:
        if region.ours or region.theirs:
            return
        del self._used[number]
        offset, size = region.offset, region.size
        at = bisect.bisect_left(self._free, (offset, size))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            before, more = self._free[at - 1]
            self._free[at - 1] = (before, more + size)
        else:
            self._free.insert(at, (offset, size))


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class ReadArena:
    """The other side's arena, mapped for reading."""

    def __init__(self, address: ArenaAddress) -> None:
        """OSError or ArenaError if it cannot be reached, which means: ask for frames."""
        # What the numbers name may be anything, and to open a pipe nobody writes to would wait for ever.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", flags)
        try:
            found = os.fstat(file)
            name = str(Path(f"/proc/self/fd/{file}").readlink())
            if not name.startswith(f"/memfd:{_NAME}") or found.st_ino != address.inode:
                raise ArenaError(f"descriptor {address.descriptor} of process {address.pid} is {name}")
            if found.st_uid != os.getuid() or found.st_size != address.size or address.size < 2 * _ALIGN:
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


def pack_envelope(places: Sequence[Place], *, released: Sequence[int] = ()) -> bytes:
    """What stands in front of the first frame: where the tensors lie, and which regions are read."""
    numbers = [number for one in places for number in (one.number, one.offset, one.size)]
    numbers += released
    return struct.pack(f"<BBH{len(numbers)}Q", ENVELOPE, len(places), len(released), *numbers)


def is_envelope(frame: bytes | bytearray | memoryview) -> bool:
    """Whether a first frame begins with one."""
    return len(frame) > 0 and frame[0] == ENVELOPE


def unpack_envelope(frame: bytes | bytearray | memoryview, *, most: int) -> tuple[list[Place], tuple[int, ...], int]:
    """Where the tensors lie, which regions are read, and the size of the envelope. ArenaError for what is not one."""
    if len(frame) < _COUNT.size:
        raise ArenaError(f"an envelope of {len(frame)} bytes")
    _, count, read = _COUNT.unpack_from(frame)
    size = _COUNT.size + count * _PLACE.size + read * _NUMBER.size
    if count > most or read > MAX_RELEASED or not count + read or len(frame) < size:
        raise ArenaError(f"an envelope of {len(frame)} bytes for {count} tensors and {read} numbers")
    places = [Place(*_PLACE.unpack_from(frame, _COUNT.size + index * _PLACE.size)) for index in range(count)]
    return places, struct.unpack_from(f"<{read}Q", frame, size - read * _NUMBER.size), size
