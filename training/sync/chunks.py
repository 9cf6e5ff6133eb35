"""Large bodies in pieces: how the sender cuts them, and what the receiver has of one.

A body of up to one chunk travels in one request. A larger one is opened with its header, its chunks come over several
connections in any order, each with a CRC, and after a cut only those are sent again that are missing. Promises that a
chunk that was received is never written again, and that nothing is believed before the digest of the whole body fits.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec import Struct

CHUNK_BYTES = 8 << 20
PIECE_BYTES = 64 << 10
"""What goes into a socket at once: little enough that a slow link takes it within the deadline of one call."""
CRC_HEADER = "X-Gkr-Crc32"
Body = Sequence[memoryview]


class UploadState(Struct, frozen=True, kw_only=True):
    """What the receiver says of a body whose header it has seen."""

    key: str
    """Names the body in the paths of its chunks."""
    missing: list[int]
    """Numbers of the chunks that have to come. None: the body is whole, and verified."""


class Upload:
    """One body on its way in. Thread-safe."""

    def __init__(self, size: int, *, sha256: str) -> None:
        self.data = np.empty(size, np.uint8)
        self._sha256 = sha256
        self._lock = threading.Lock()
        self._received: set[int] = set()
        self._hashing = threading.Lock()
        self._digest, self._hashed = hashlib.sha256(), 0

    @property
    def count(self) -> int:
        """Chunks of the body."""
        return -(-len(self.data) // CHUNK_BYTES)

    def length(self, index: int) -> int:
        """Bytes of one chunk."""
        return min(CHUNK_BYTES, len(self.data) - index * CHUNK_BYTES)

    def missing(self) -> list[int]:
        """Chunks that were not received."""
        with self._lock:
            return [index for index in range(self.count) if index not in self._received]

    def write(self, index: int, *, offset: int, piece: memoryview) -> None:
        """Put a piece of a chunk in its place, unless the chunk came whole by another connection."""
        start = index * CHUNK_BYTES + offset
        with self._lock:
            if index not in self._received:
                self.data.data[start : start + len(piece)] = piece

    def receive(self, index: int) -> None:
        """A chunk came whole. What can be hashed by now is hashed, so that little is left to do at the end."""
        with self._lock:
            self._received.add(index)
        if self._hashing.acquire(blocking=False):
            try:
                self._hash()
            finally:
                self._hashing.release()

    def verify(self) -> bool:
        """Whether the whole body has its digest; if not, it has to come again."""
        with self._hashing:
            self._hash()
            if self._hashed == self.count and self._digest.hexdigest() == self._sha256:
                return True
            self._digest, self._hashed = hashlib.sha256(), 0
            with self._lock:
                self._received.clear()
            return False

    def _hash(self) -> None:
        while True:
            with self._lock:
                if self._hashed not in self._received:
                    return
            start = self._hashed * CHUNK_BYTES
            self._digest.update(self.data.data[start : start + CHUNK_BYTES])
            self._hashed += 1


def upload_key(header: Struct) -> str:
    """The same for the same header, so that a body is found again after a cut."""
    return hashlib.sha256(msgspec.json.encode(header)).hexdigest()[:32]


def chunk(body: Body, index: int) -> list[memoryview]:
    """One chunk of a body that lies in several arrays."""
    first, last = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
    found: list[memoryview] = []
    position = 0
    for view in body:
        start, stop = max(first - position, 0), min(last - position, len(view))
        if start < stop:
            found.append(view[start:stop])
        position += len(view)
    return found


def crc_of(views: Sequence[memoryview]) -> str:
    """CRC-32 as it travels in a header."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return f"{value:08x}"


class Pace:
    """A token bucket that all connections of a process share; one for each direction."""

    def __init__(self, bytes_per_second: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._lock = threading.Lock()
        self._free = clock()

    def take(self, size: int) -> float:
        """Seconds after which so many bytes may go; they are booked."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free)
            self._free = start + size / self._rate
            return start - now
