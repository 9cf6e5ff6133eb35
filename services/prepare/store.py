"""Puts a dataset in a folder, whole or not at all.

Shards are written into a temporary folder beside their place, made durable, and renamed to a name that is their
content's; the manifest is renamed last, and only a manifest makes a dataset. A killed preparer leaves at most files
that no manifest names; the next one removes them. Several preparers of one place take turns by a file lock that the
kernel releases with its holder; the later ones find the dataset there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path

from services.prepare.packing import Content, Packed, refuse_other
from spec.errors import DataError, GkrError
from spec.shards import Manifest, open_manifest, path_of, read_shard
from storage.folder import FULL

_POLL_SECONDS = 0.05
_TEMPORARY = ".prepare-"


@contextlib.contextmanager
def exclusive(folder: Path, *, timeout_seconds: float) -> Generator[None]:
    """Be the only preparer of this folder; waits for another one until the deadline."""
    path = folder / ".prepare.lock"
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout_seconds
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process has been preparing this dataset for over {timeout_seconds:g} s",
                    where=str(path),
                    hint=f"see who: fuser -v {path}; end it if it hangs, then start again",
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def find(uri: str, *, content: Content) -> Manifest | None:
    """The dataset that is already there, read back in full; none if there is none."""
    if not path_of(uri).exists():
        return None
    manifest = open_manifest(uri)
    refuse_other(manifest, content=content, where=str(path_of(uri)))
    for shard in [*manifest.splits.train, *manifest.splits.test]:
        read_shard(shard, uri=uri, manifest=manifest)
    return manifest


def write(uri: str, *, packed: Packed) -> Manifest:
    """Write a dataset. The caller holds the folder's lock."""
    path = path_of(uri)
    with explained(path.parent):
        _remove_leftovers(path.parent)
        temporary = path.parent / f"{_TEMPORARY}{os.getpid()}"
        temporary.mkdir()
        try:
            for file in packed.files:
                _write_durable(temporary / file.name, file.data)
            _sync_folder(temporary)
            folder = path.parent / packed.folder
            if not _holds(folder, packed):  # else they are those of another manifest beside this one, and in use
                shutil.rmtree(folder, ignore_errors=True)  # of a preparer that was killed before its manifest
                temporary.rename(folder)
            _commit(path, packed.manifest)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return packed.manifest


def _holds(folder: Path, packed: Packed) -> bool:
    """Whether the files are there already: the folder's name is that of its content."""
    paths = [(folder / file.name, file.sha256) for file in packed.files]
    return all(path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256 for path, sha256 in paths)


def _commit(path: Path, manifest: Manifest) -> None:
    beside = path.with_name(f"{_TEMPORARY}{os.getpid()}.json")
    _write_durable(beside, manifest.write_json().encode() + b"\n")
    beside.rename(path)
    _sync_folder(path.parent)


def _write_durable(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{_TEMPORARY}[0-9]*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def explained(folder: Path) -> Generator[None]:
    """Turn what the file system refuses into an error with place and remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in FULL
        hint = f"free space on the file system of {folder}" if full else "check the path and its permissions"
        where = str(error.filename or folder)
        failure: GkrError = DataError(f"the dataset cannot be written: {error.strerror}", where=where, hint=hint)
        raise failure from error
    except sqlite3.Error as error:
        raise DataError(
            f"the journal of the preparation cannot be written: {error}",
            where=str(folder),
            hint="free space on its file system and start again; if there is enough, remove this folder before",
        ) from error
