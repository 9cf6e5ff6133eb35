"""What has happened in a node's cache so far, summed over all processes that use it."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from storage.locks import lock_within

_FILE = "counts"
_LOCK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """Sums since the cache was made."""

    hits: int = 0
    """Copies that were there when they were asked for."""
    misses: int = 0
    """Copies that were not."""
    fetched: int = 0
    fetched_bytes: int = 0
    evicted: int = 0
    """Copies that were removed to make room."""
    evicted_bytes: int = 0
    damaged: int = 0
    """Copies that were removed because their bytes had changed."""
    taken_over: int = 0
    """Fetches that stood still and were begun again by another process."""
    range_reads: int = 0
    """Samples that were read where the dataset is, without a copy."""
    range_bytes: int = 0

    def since(self, before: CacheCounts) -> CacheCounts:
        """What has happened since `before`; all, if the cache was removed and made again meanwhile."""
        pairs = [(getattr(self, one.name), getattr(before, one.name)) for one in fields(self)]
        if any(now < had for now, had in pairs):
            return self
        return CacheCounts(**{one.name: now - had for one, (now, had) in zip(fields(self), pairs, strict=True)})


_LAYOUT = struct.Struct(f"<{len(fields(CacheCounts))}Q")


def read_counts(cache: Path) -> CacheCounts:
    """The sums in a cache's folder; zeros if there are none, or they cannot be read."""
    try:
        data = (cache / _FILE).read_bytes()
    except OSError:
        data = b""
    return _unpack(data)


def add_counts(cache: Path, more: CacheCounts) -> None:
    """Add to the sums in a cache's folder, if they can be written; who reads a sample never fails for that.

    A process that is killed meanwhile loses at most its own addition.
    """
    with suppress(OSError):  # a full disk, another user's cache, a folder that was removed under a run
        descriptor = os.open(cache / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Who holds it writes 80 bytes; if it was stopped just then, its counts and ours are the smaller loss.
            if lock_within(descriptor, seconds=_LOCK_SECONDS):
                now = astuple(_unpack(os.pread(descriptor, _LAYOUT.size, 0)))
                data = _LAYOUT.pack(*(had + one for had, one in zip(now, astuple(more), strict=True)))
                os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)


def _unpack(data: bytes) -> CacheCounts:
    if len(data) != _LAYOUT.size:
        return CacheCounts()
    return CacheCounts(**dict(zip((one.name for one in fields(CacheCounts)), _LAYOUT.unpack(data), strict=True)))
