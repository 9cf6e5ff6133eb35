"""Copies of objects on this machine, by content, within a limit of bytes: what all processes of a node share.

    objects/SHA256            whole and verified; its time of change is that of its last use
    partial/SHA256.RANDOM     on its way; whoever fetches it holds its lock
    datasets/DIGEST/          a dataset's manifest, links to its copies under their names (`storage.datasets`), and a
                              lock that its users share
    lock                      held for moments, while room is made
    limit, counts             bytes that copies may take; what has happened so far

Promises: an object is fetched by one process at a time; if that dies, or gets no byte for LEASE_SECONDS, another takes
over. Copies and what is on its way never take more than the limit: room is taken, on the disk too, before the first
byte. What was used least recently goes first, and what a process holds open through `open` or `hold` never goes: that
is a shared lock, which the kernel releases with the process. An optional copy, without which a loader would read by
range, takes no room from datasets that are in use (`use`) and leaves some for copies that have to be. Nothing of a
process that was killed has to be cleaned up by hand. Optional copies are not made durable: one that a crash of the
machine damaged is found by its samples' checksums, like any other, and `discard` makes it be fetched again. Standard
library only: loader workers import this module.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from spec.errors import DataError, UnreachableError
from storage.cache_counts import CacheCounts, add_counts, read_counts
from storage.errors import MissingError, NoRoomError, damaged_shard, missing_shard
from storage.folder import FULL, appearing, check_digest, file_errors
from storage.locks import lock_within, try_lock
from storage.protocol import Bucket

MANIFEST = "manifest.json"
FREE_SHARE = 0.5
"""Of what is free or taken by copies: the limit where none is set."""
FETCH_SECONDS = 1800.0
"""Longest wait for another process that fetches the same object."""
LEASE_SECONDS = 180.0
"""A fetch that got no byte for so long is taken over; every request of ours has given up before."""
LOCK_SECONDS = 60.0
OPTIONAL_SHARE = 0.9
"""Of the limit, for optional copies."""
_POLL_SECONDS = 0.05
_DIGEST = re.compile(r'"sha256": ?"([0-9a-f]{64})"')


@dataclass(frozen=True)
class Wanted:
    """An object whose copy is asked for."""

    key: str
    """In its bucket."""
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Copy:
    """A whole object in the cache."""

    sha256: str
    bytes: int
    used: float
    """When it was opened last; seconds since 1970."""


class StoppedError(Exception):
    """The caller gave a fetch up."""


class Cache:
    """One folder. Safe to use from any number of processes and threads."""

    def __init__(self, root: Path, *, limit_bytes: int | None = None) -> None:
        """`limit_bytes` becomes the limit of all processes that use this folder, and what is too much goes as far as
        nobody holds it; none: it stays as it is."""
        self.root = root
        self._objects, self._partial = root / "objects", root / "partial"
        self._make_folders()
        if limit_bytes is not None and limit_bytes != self._limit_set():
            with appearing(root / "limit") as temporary:
                temporary.write_text(f"{limit_bytes}\n", encoding="ascii")
            self.prune(limit_bytes)

    @property
    def counts(self) -> CacheCounts:
        """What has happened here so far, in all processes."""
        return read_counts(self.root)

    @property
    def limit_bytes(self) -> int:
        """What copies may take now."""
        return self._limit(self.taken_bytes())

    def taken_bytes(self) -> int:
        """Bytes of all copies, also of those on their way."""
        found: dict[int, int] = {}  # by inode: what becomes whole meanwhile counts once
        for folder in (self._partial, self._objects):
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    told = path.stat()
                    found[told.st_ino] = told.st_size
        return sum(found.values())

    def count(self, **more: int) -> None:
        """Add to the counts."""
        add_counts(self.root, CacheCounts(**more))

    def path(self, sha256: str) -> Path:
        """Where a copy is, or would be."""
        return self._objects / sha256

    def open(self, one: Wanted) -> int | None:
        """Descriptor of the copy, which stays until it is closed; none if it is not here."""
        found = self._open(one)
        if found is not None:
            self.count(hits=1)
        return found

    def use(self, dataset: str) -> int:
        """A descriptor that marks the dataset of this digest as in use until it is closed."""
        path = self.root / "datasets" / dataset / ".lock"
        with file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Only who looks whether it is in use holds it alone, for a moment. Unmarked, reading is slower and not wrong.
        lock_within(descriptor, seconds=LOCK_SECONDS, kind=fcntl.LOCK_SH)
        return descriptor

    def is_used(self, dataset: str) -> bool:
        """Whether a process has marked it so."""
        with suppress(FileNotFoundError), (self.root / "datasets" / dataset / ".lock").open("rb") as file:
            return not try_lock(file.fileno())
        return False

    def hold(self, one: Wanted, *, bucket: Bucket, optional: bool = False) -> int:
        """Like `open`, but fetched if it is not here.

        NoRoomError, DataError if the object is missing or damaged, UnreachableError if nobody brings it in time.
        """
        found = self.open(one)
        if found is not None:
            return found
        self.count(misses=1)
        until = time.monotonic() + FETCH_SECONDS
        while (found := self.fetch(one, bucket=bucket, optional=optional)) is None:
            if time.monotonic() > until:
                raise UnreachableError(
                    f"another process has been fetching this file for {FETCH_SECONDS:g} s",
                    where=str(self.path(one.sha256)),
                    hint=f"see who: fuser -v {self._partial}/*; end it if it hangs",
                )
            time.sleep(_POLL_SECONDS)
        return found

    def fetch(
        self,
        one: Wanted,
        *,
        bucket: Bucket,
        optional: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Like `hold`, but none at once if another process is at it; StoppedError soon after `stop` says so."""
        with self._locked():
            coming = self._coming()
            if any(name.startswith(one.sha256) for name in coming):
                return None
            if self.path(one.sha256).exists():
                return self._open(one)
            self._make_room(one.bytes, coming=sum(coming.values()), optional=optional, where=one.key)
            path = self._partial / f"{one.sha256}.{secrets.token_hex(4)}"
            descriptor = self._begin(path, one)
        try:
            self._receive(descriptor, one, bucket=bucket, stop=stop)
            if not optional:
                with file_errors(path):
                    os.fsync(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # from the first moment of its name it is held
            path.rename(self.path(one.sha256))
        except FileNotFoundError:  # we stood still for so long that another has taken over
            os.close(descriptor)
            return None
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self.count(fetched=1, fetched_bytes=one.bytes)
        return descriptor

    def discard(self, one: Wanted, *, descriptor: int) -> None:
        """Remove a copy whose bytes are not those of the object, if it still is the one that was opened."""
        path = self.path(one.sha256)
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                path.unlink()
                self.count(damaged=1)

    def copies(self) -> list[Copy]:
        """What is here, the least recently used first."""
        found: list[Copy] = []
        with os.scandir(self._objects) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    told = entry.stat()
                    found.append(Copy(entry.name, told.st_size, told.st_mtime))
        return sorted(found, key=lambda one: (one.used, one.sha256))

    def prune(self, to_bytes: int = 0) -> int:
        """Remove the least recently used copies that nobody holds until the rest takes at most so much; bytes."""
        with self._locked():
            self._coming()
            copies = self.copies()
            over = sum(one.bytes for one in copies) - to_bytes
            return self._remove(copies, at_least=over, enough_only=False)

    def _open(self, one: Wanted) -> int | None:
        path = self.path(one.sha256)
        with file_errors(path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
        # Whoever removes it holds the lock alone, and has unlinked it when the lock is free again.
        if not try_lock(descriptor, fcntl.LOCK_SH) or os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_size != one.bytes:
            self.discard(one, descriptor=descriptor)
            os.close(descriptor)
            return None
        with suppress(OSError):  # another user's cache, or one on a read-only disk
            os.utime(descriptor)
        return descriptor

    def _coming(self) -> dict[str, int]:
        """Names and bytes of what is on its way; what nobody works on any more is removed."""
        found: dict[str, int] = {}
        for path in self._partial.iterdir():
            with suppress(FileNotFoundError), path.open("rb") as file:  # it may just have become a copy
                told = os.fstat(file.fileno())
                is_left = try_lock(file.fileno())
                if not is_left and time.time() - told.st_mtime <= LEASE_SECONDS:
                    found[path.name] = told.st_size
                    continue
                path.unlink(missing_ok=True)
                if not is_left:
                    self.count(taken_over=1)
        return found

    def _make_room(self, size: int, *, coming: int, optional: bool, where: str) -> None:
        copies = self.copies()
        taken = coming + sum(one.bytes for one in copies)
        limit = self._limit(taken)
        if optional:
            limit = int(limit * OPTIONAL_SHARE)
        over = taken + size - limit
        if over <= 0:
            return
        used = self._used() if optional else frozenset[str]()
        if self._remove([one for one in copies if one.sha256 not in used], at_least=over, enough_only=True) < over:
            self._no_room(size, limit=limit, taken=taken, where=where)

    def _used(self) -> frozenset[str]:
        """Digests of the objects of all datasets that are in use."""
        folders = [path for path in self.root.glob("datasets/*") if self.is_used(path.name)]
        return frozenset(one for path in folders for one in _objects_of(path / MANIFEST))

    def _remove(self, copies: list[Copy], *, at_least: int, enough_only: bool) -> int:
        """Remove the first that nobody holds until they make up so many bytes; none if they cannot, if so wished."""
        if enough_only and sum(one.bytes for one in self._unheld(copies, at_least=at_least)) < at_least:
            return 0
        removed: list[Copy] = []
        for one in self._unheld(copies, at_least=at_least):
            self.path(one.sha256).unlink(missing_ok=True)
            removed.append(one)
        size = sum(one.bytes for one in removed)
        if removed:
            self.count(evicted=len(removed), evicted_bytes=size)
        return size

    def _unheld(self, copies: list[Copy], *, at_least: int) -> Generator[Copy]:
        """The first that nobody holds, until they make up so many bytes; each is ours alone until the next is asked
        for. One at a time: there may be more copies than a process may have files open."""
        size = 0
        for one in copies:
            if size >= at_least:
                return
            with suppress(FileNotFoundError), self.path(one.sha256).open("rb") as file:
                if try_lock(file.fileno()):
                    size += one.bytes
                    yield one

    def _begin(self, path: Path, one: Wanted) -> int:
        """An empty file of the object's size that we alone hold, all of it there on the disk."""
        with file_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.posix_fallocate(descriptor, 0, one.bytes)
            except OSError as error:
                path.unlink()
                os.close(descriptor)
                if error.errno in FULL:
                    self._no_room(one.bytes, limit=one.bytes, taken=0, where=one.key)
                raise
        return descriptor

    def _receive(self, descriptor: int, one: Wanted, *, bucket: Bucket, stop: Callable[[], bool]) -> None:
        digest, size = hashlib.sha256(), 0
        where = f"{bucket.uri}/{one.key}"
        try:
            for piece in bucket.pieces(one.key):
                if stop():
                    raise StoppedError
                digest.update(piece)
                with file_errors(self._partial):
                    while len(piece):
                        written = os.pwrite(descriptor, piece, size)
                        piece, size = memoryview(piece)[written:], size + written
                if size > one.bytes:
                    break
            check_digest(digest.hexdigest(), wanted=one.sha256, where=where)
        except MissingError as error:
            raise missing_shard(where) from error
        except DataError as error:
            raise damaged_shard(error) from error

    def _no_room(self, size: int, *, limit: int, taken: int, where: str) -> None:
        free = shutil.disk_usage(self.root).free
        raise NoRoomError(
            f"no room for a copy of {where}: it needs {size} bytes; {max(0, limit - taken)} are left of the {limit}"
            f" that copies may take, {free} are free on the disk, and the other copies are in use",
            where=str(self.root),
            hint="raise data.cache_limit, free space on this file system, or name a larger one in GKR_DATA_CACHE;"
            " `gkr data cache` shows what is there",
        )

    def _limit(self, taken: int) -> int:
        most = taken + shutil.disk_usage(self.root).free
        given = self._limit_set()
        return int(most * FREE_SHARE) if given is None else min(given, most)

    def _limit_set(self) -> int | None:
        try:
            return int((self.root / "limit").read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def _make_folders(self) -> None:
        for folder in (self._objects, self._partial):
            with file_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _locked(self) -> Generator[None]:
        self._make_folders()  # who removed the cache under a run wanted its room, not the run's end
        path = self.root / "lock"
        with file_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if not lock_within(descriptor, seconds=LOCK_SECONDS):
                    raise UnreachableError(
                        f"the cache has been locked by another process for {LOCK_SECONDS:g} s",
                        where=str(path),
                        hint=f"see who: fuser -v {path}; end it if it hangs",
                    )
                yield
            finally:
                os.close(descriptor)


@lru_cache(maxsize=64)
def _objects_of(manifest: Path) -> tuple[str, ...]:
    """Digests that a dataset's manifest names; the folder's name is its digest, so it never changes."""
    try:
        return tuple(_DIGEST.findall(manifest.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ()
