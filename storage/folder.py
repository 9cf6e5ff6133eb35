"""A folder of this machine as a bucket.

What a call wrote is durable when the call returns. `replace` is guarded by a lock file, so it holds between processes
of one machine; tags are digests of content. A writer that was killed leaves at most a `.partial-` file that no listing
shows and `clear` removes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from spec.errors import DataError, RefusedError, UnreachableError
from storage.errors import ExistsError, MissingError, StaleError
from storage.locks import POLL_SECONDS, lock_within
from storage.protocol import Bytes, Entry, Stored, checked_key

LOCK_SECONDS = 10.0
_TEMPORARY = ".partial-"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MAKE_TRIES = 20
_BLOCK = 2**20

Buffer = TypeVar("Buffer", bytes, memoryview)


class Folder:
    """One folder. It need not exist before the first write."""

    poll_seconds = POLL_SECONDS

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = f"file://{quote(str(path))}"

    def get(self, key: str) -> Stored:
        with file_errors(self._path(key)):
            data = self._path(key).read_bytes()
        return Stored(data, hashlib.sha256(data).hexdigest())

    def put(self, key: str, data: bytes) -> str:
        self.write(key, [data])
        return hashlib.sha256(data).hexdigest()

    def create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with file_errors(path), self._written(path, [data]) as temporary:
            os.link(temporary, path)  # unlike a rename, it fails where the name is taken
        return hashlib.sha256(data).hexdigest()

    def replace(self, key: str, data: bytes, *, tag: str) -> str:
        with self._locked(self._path(key)):
            if self.get(key).tag != tag:
                raise StaleError("the file was changed by somebody else", where=str(self._path(key)))
            return self.put(key, data)

    def read(self, key: str) -> bytearray:
        path = self._path(key)
        with file_errors(path), path.open("rb") as file:
            data = bytearray(os.fstat(file.fileno()).st_size)
            found = file.readinto(data)
        if found != len(data):
            raise DataError(f"the file has {found} bytes instead of {len(data)}", where=str(path))
        return data

    def read_range(self, key: str, *, offset: int, size: int) -> bytes:
        path = self._path(key)
        with file_errors(path), path.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
        return checked_length(data, wanted=size, where=str(path))

    def pieces(self, key: str) -> Iterator[bytes]:
        path = self._path(key)
        with file_errors(path), path.open("rb") as file:
            yield from iter(lambda: file.read(_BLOCK), b"")

    def write(self, key: str, pieces: Iterable[Bytes]) -> int:
        path = self._path(key)
        with file_errors(path), self._written(path, pieces) as temporary:
            size = temporary.stat().st_size
            temporary.replace(path)
        return size

    def digest(self, key: str) -> tuple[int, str]:
        path = self._path(key)
        with file_errors(path), path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> int:
        source = self._path(key)
        with file_errors(source), appearing(path) as temporary:
            shutil.copyfile(source, temporary)
            if sha256:
                with temporary.open("rb") as file:
                    check_digest(hashlib.file_digest(file, "sha256").hexdigest(), wanted=sha256, where=str(source))
        return path.stat().st_size

    def send(self, key: str, path: Path) -> int:
        with file_errors(path), path.open("rb") as file:
            return self.write(key, iter(lambda: file.read(_BLOCK), b""))

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Entry]:
        found: list[Path] = []
        with file_errors(self._path(prefix)):
            for folder, _, names in os.walk(self._path(prefix), onerror=_unless_gone):
                found += [Path(folder, name) for name in names if not name.startswith(_TEMPORARY)]
        for key, path in sorted((path.relative_to(self.path).as_posix(), path) for path in found):
            if key <= after:
                continue
            with suppress(OSError):  # removed while we looked, or a link that leads nowhere
                told = path.stat()
                if stat.S_ISREG(told.st_mode):  # to read a named pipe would wait for its writer
                    yield Entry(key, told.st_size, told.st_mtime)

    def folders(self, prefix: str = "") -> list[str]:
        path = self._path(prefix)
        if not path.is_dir():
            return []
        with file_errors(path):
            return sorted(one.name for one in os.scandir(path) if one.is_dir())

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def delete(self, keys: Iterable[str]) -> None:
        touched: set[Path] = set()
        for key in keys:
            path = self._path(key)
            with file_errors(path), suppress(FileNotFoundError):
                path.unlink()
                touched.add(path.parent)
        for folder in touched:
            _sync_folder(folder)
            self._remove_empty(folder)

    def clear(self, prefix: str) -> None:
        path = self._path(prefix)
        shutil.rmtree(path, ignore_errors=True)
        if path != self.path:
            self._remove_empty(path.parent)

    def below(self, prefix: str) -> Folder:
        return Folder(self._path(prefix))

    def _path(self, key: str) -> Path:
        return self.path / checked_key(key)

    def _remove_empty(self, folder: Path) -> None:
        """A folder without files is none, as in an object store; the bucket's own stays."""
        while folder != self.path and folder.is_relative_to(self.path):
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    @contextmanager
    def _written(self, path: Path, pieces: Iterable[Bytes]) -> Generator[Path]:
        """A durable file with these bytes beside `path`; durable under the name that the block gives it."""
        descriptor, name = _make_beside(path)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, path: Path) -> Generator[None]:
        with file_errors(path), path.with_name(f"{_TEMPORARY}lock-{path.name}").open("ab") as file:
            if not lock_within(file.fileno(), seconds=LOCK_SECONDS):
                raise UnreachableError(
                    f"the file has been locked by another process for {LOCK_SECONDS:g} s", where=str(path)
                )
            yield


def _unless_gone(error: OSError) -> None:
    """A folder that is not there holds nothing; one that cannot be read is not the same."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def check_digest(found: str, *, wanted: str, where: str) -> None:
    """DataError unless both are equal."""
    if found != wanted:
        raise DataError(
            f"the object is damaged: sha256 {found[:12]}, expected {wanted[:12]}",
            where=where,
            hint="write it again from its source, or restore it from a copy",
        )


def checked_length(data: Buffer, *, wanted: int, where: str) -> Buffer:
    """The bytes that came; DataError unless they are as many as were asked for."""
    if len(data) != wanted:
        raise DataError(f"{len(data)} bytes came instead of {wanted}", where=where)
    return data


@contextmanager
def appearing(path: Path) -> Generator[Path]:
    """A temporary file that takes its final name if the block succeeds."""
    with file_errors(path):
        descriptor, name = _make_beside(path)
    os.close(descriptor)
    try:
        yield Path(name)
        with file_errors(path):
            Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def file_errors(path: Path) -> Generator[None]:
    """Turn what the file system refuses into the errors of a store."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError("there is no such file", where=str(path), hint="check the path") from error
    except FileExistsError as error:
        raise ExistsError("the file is there already", where=str(path)) from error
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise RefusedError(f"{error.strerror}", where=str(path), hint="check the path and its permissions") from error
    except OSError as error:
        full = error.errno in FULL
        raise UnreachableError(
            f"the disk is full: {error.strerror}" if full else f"the file system failed: {error.strerror}",
            where=str(path),
            hint=f"free space on the file system of {path.parent}" if full else "look at the disk and the kernel's log",
        ) from error


def _make_beside(path: Path) -> tuple[int, str]:
    """A new temporary file in the folder of `path`, which is made, again if somebody removes it as empty just then."""
    for left in reversed(range(_MAKE_TRIES)):
        try:
            _make_folder(path.parent)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
        except (FileNotFoundError, FileExistsError) as error:
            blocked = next((one for one in path.parents if one.is_file()), None)
            if blocked is not None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(blocked)) from error
            if not left:
                raise
        else:
            os.fchmod(descriptor, 0o644)
            return descriptor, name
    raise AssertionError


def _make_folder(folder: Path) -> None:
    """Make a folder whose name, and those of new ones above it, are durable."""
    new = [folder]
    while not new[-1].parent.exists():
        new.append(new[-1].parent)
    if folder.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for one in new:
        _sync_folder(one.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # removed as empty by another process
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
