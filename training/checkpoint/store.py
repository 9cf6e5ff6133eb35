"""The folder of a learner's checkpoints: names, durable small files, what is committed, and what may go.

Promises: COMMIT appears whole and only once; a checkpoint loses its COMMIT before anything else of it goes; the newest
committed checkpoints that verify are never deleted. Newest means highest (epoch, attempt, step): what a fenced attempt
wrote late never wins.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from spec.errors import DataError
from training.checkpoint.documents import Commit, Manifest

COMMIT = "COMMIT"
MANIFEST = "MANIFEST.json"
_FOLDER = re.compile(r"e(\d+)-a(\d+)")
_STEP = re.compile(r"step-(\d+)")
_HINT = "an older checkpoint is used if there is one"


@dataclass(frozen=True, order=True)
class Place:
    """One attempt's checkpoint of one step; the order is age."""

    epoch: int
    attempt: int
    step: int

    def folder(self, root: Path) -> Path:
        """Where it lies."""
        return root / f"step-{self.step:08d}" / f"e{self.epoch}-a{self.attempt}"


def places(root: Path) -> list[Place]:
    """All attempts' folders, committed or not, newest first."""
    found: list[Place] = []
    for folder in root.glob("step-*/e*-a*"):
        step, attempt = _STEP.fullmatch(folder.parent.name), _FOLDER.fullmatch(folder.name)
        if step and attempt:
            found.append(Place(epoch=int(attempt[1]), attempt=int(attempt[2]), step=int(step[1])))
    return sorted(found, reverse=True)


def is_committed(root: Path, *, place: Place) -> bool:
    """True if its COMMIT is there; says nothing about the rest."""
    return (place.folder(root) / COMMIT).exists()


def write_whole(path: Path, *, data: bytes, replace: bool = True) -> None:
    """Make a small file appear whole and durable; with replace=False FileExistsError if it is there already."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            partial.replace(path)
        else:
            os.link(partial, path)  # unlike a rename, it fails where the name is taken
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(root: Path, *, place: Place) -> Manifest:
    """The manifest that COMMIT vouches for; DataError or OSError if either cannot be trusted."""
    folder = place.folder(root)
    try:
        commit = Commit.read_json((folder / COMMIT).read_bytes())
    except (ValidationError, FileNotFoundError) as error:
        raise DataError("COMMIT cannot be read", where=str(folder), hint=_HINT) from error
    data = (folder / MANIFEST).read_bytes()
    if hashlib.sha256(data).hexdigest() != commit.manifest_sha256:
        raise DataError("MANIFEST.json is not the one that COMMIT names", where=str(folder), hint=_HINT)
    try:
        manifest = Manifest.read_json(data)
    except ValidationError as error:
        raise DataError(
            "MANIFEST.json is of another version than this program reads", where=str(folder), hint=_HINT
        ) from error
    told = Place(epoch=manifest.epoch, attempt=manifest.attempt, step=manifest.step)
    if told != place:
        raise DataError(f"it is a copy of {told.folder(root)}", where=str(folder), hint=_HINT)
    return manifest


def commit(root: Path, *, manifest: Manifest) -> None:
    """Make a checkpoint true. DataError if a later epoch or attempt has committed already: this one is fenced."""
    place = Place(epoch=manifest.epoch, attempt=manifest.attempt, step=manifest.step)
    folder, data = place.folder(root), manifest.write_json().encode()
    write_whole(folder / MANIFEST, data=data)
    sync_folder(folder.parent)
    sync_folder(root)
    newest = next((one for one in places(root) if is_committed(root, place=one)), None)
    if newest is not None and newest > place:
        raise DataError(
            f"epoch {newest.epoch} attempt {newest.attempt} has committed step {newest.step} already; this one is over",
            where=str(folder),
        )
    seal = Commit(
        step=place.step, epoch=place.epoch, attempt=place.attempt, manifest_sha256=hashlib.sha256(data).hexdigest()
    )  # fmt: skip
    write_whole(folder / COMMIT, data=seal.write_json().encode(), replace=False)


def remove(root: Path, *, place: Place) -> None:
    """Delete a checkpoint: what makes it one first, then the rest."""
    folder = place.folder(root)
    (folder / COMMIT).unlink(missing_ok=True)
    if folder.exists():
        sync_folder(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.exists() and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def prune(root: Path, *, keep: int, own: Place) -> list[Place]:
    """Delete what `keep` newer whole checkpoints have replaced, and unfinished ones older than `own`; returns both."""
    gone: list[Place] = []
    verified = 0
    for place in places(root):
        if place > own:
            continue
        if not is_committed(root, place=place):
            if place < own:
                gone.append(place)
        elif verified >= keep:
            gone.append(place)
        elif looks_whole(root, place=place):
            verified += 1
    for place in gone:
        remove(root, place=place)
    return gone


def looks_whole(root: Path, *, place: Place) -> bool:
    """COMMIT, manifest and the parts' sizes fit; the digests were checked when the parts were written."""
    try:
        manifest = read_manifest(root, place=place)
        return all((place.folder(root) / part.file).stat().st_size == part.bytes for part in manifest.parts)
    except (DataError, OSError):
        return False
