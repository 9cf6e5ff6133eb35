"""The place of a learner's checkpoints in a bucket: names, what is committed, and what may go.

Promises: COMMIT appears whole and only once; a checkpoint loses its COMMIT before anything else of it goes; the newest
committed checkpoints that verify are never deleted. Newest means highest (epoch, attempt, step): what a fenced attempt
wrote late never wins.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from spec.errors import DataError, GkrError
from storage import Bucket, MissingError, file_path
from training.checkpoint.documents import Commit, Manifest, Receipt

COMMIT = "COMMIT"
MANIFEST = "MANIFEST.json"
_FOLDER = re.compile(r"e(\d+)-a(\d+)")
_STEP = re.compile(r"step-(\d+)")
_READERS = 16
_HINT = "an older checkpoint is used if there is one"


@dataclass(frozen=True, order=True)
class Place:
    """One attempt's checkpoint of one step; the order is age."""

    epoch: int
    attempt: int
    step: int

    @property
    def key(self) -> str:
        """Where it lies in the bucket of the learner's checkpoints."""
        return f"step-{self.step:08d}/e{self.epoch}-a{self.attempt}"


def shown(bucket: Bucket, key: str) -> str:
    """A place for people: the path in a folder, else the URI."""
    folder = file_path(bucket.uri)
    return str(folder / key) if folder is not None else f"{bucket.uri}/{key}"


def places(bucket: Bucket) -> list[Place]:
    """All attempts' folders, committed or not, newest first."""
    found: list[Place] = []
    for parent in bucket.folders():
        step = _STEP.fullmatch(parent)
        for name in bucket.folders(parent) if step else []:
            attempt = _FOLDER.fullmatch(name)
            if step and attempt:
                found.append(Place(epoch=int(attempt[1]), attempt=int(attempt[2]), step=int(step[1])))
    return sorted(found, reverse=True)


def is_committed(bucket: Bucket, *, place: Place) -> bool:
    """True if its COMMIT is there; says nothing about the rest."""
    return bucket.exists(f"{place.key}/{COMMIT}")


def read_manifest(bucket: Bucket, *, place: Place) -> Manifest:
    """The manifest that COMMIT vouches for; DataError if either cannot be trusted."""
    where = shown(bucket, place.key)
    try:
        commit = Commit.read_json(bucket.get(f"{place.key}/{COMMIT}").data)
    except (ValidationError, MissingError) as error:
        raise DataError("COMMIT cannot be read", where=where, hint=_HINT) from error
    data = bucket.get(f"{place.key}/{MANIFEST}").data
    if hashlib.sha256(data).hexdigest() != commit.manifest_sha256:
        raise DataError("MANIFEST.json is not the one that COMMIT names", where=where, hint=_HINT)
    try:
        manifest = Manifest.read_json(data)
    except ValidationError as error:
        raise DataError(
            "MANIFEST.json is of another version than this program reads", where=where, hint=_HINT
        ) from error
    told = Place(epoch=manifest.epoch, attempt=manifest.attempt, step=manifest.step)
    if told != place:
        raise DataError(f"it is a copy of {shown(bucket, told.key)}", where=where, hint=_HINT)
    return manifest


def read_receipts(bucket: Bucket, place: Place, *, ranks: Set[int]) -> list[Receipt]:
    """What these ranks have said about their parts so far."""
    wanted = {f"{place.key}/rank-{rank}.json" for rank in ranks}
    keys = [entry.key for entry in bucket.list(place.key) if entry.key in wanted]
    if len(keys) < _READERS:
        return [_read_receipt(bucket, key) for key in keys]
    with ThreadPoolExecutor(_READERS) as pool:  # thousands of small objects: each takes as long as a round trip
        return list(pool.map(partial(_read_receipt, bucket), keys))


def _read_receipt(bucket: Bucket, key: str) -> Receipt:
    try:
        return Receipt.read_json(bucket.get(key).data)
    except ValidationError as error:
        raise DataError("a receipt cannot be read", where=shown(bucket, key)) from error


def commit(bucket: Bucket, *, manifest: Manifest) -> None:
    """Make a checkpoint true. DataError if a later epoch or attempt has committed already: this one is fenced."""
    place = Place(epoch=manifest.epoch, attempt=manifest.attempt, step=manifest.step)
    data = manifest.write_json().encode()
    bucket.put(f"{place.key}/{MANIFEST}", data)
    newest = next((one for one in places(bucket) if is_committed(bucket, place=one)), None)
    if newest is not None and newest > place:
        raise DataError(
            f"epoch {newest.epoch} attempt {newest.attempt} has committed step {newest.step} already; this one is over",
            where=shown(bucket, place.key),
        )
    seal = Commit(
        step=place.step, epoch=place.epoch, attempt=place.attempt, manifest_sha256=hashlib.sha256(data).hexdigest()
    )  # fmt: skip
    bucket.create(f"{place.key}/{COMMIT}", seal.write_json().encode())


def remove(bucket: Bucket, *, place: Place) -> None:
    """Delete a checkpoint: what makes it one first, then the rest."""
    bucket.delete([f"{place.key}/{COMMIT}"])
    bucket.clear(place.key)


def prune(bucket: Bucket, *, keep: int, own: Place) -> list[Place]:
    """Delete what `keep` newer whole checkpoints have replaced, and unfinished ones older than `own`; returns both."""
    gone: list[Place] = []
    verified = 0
    for place in places(bucket):
        if place > own:
            continue
        if not is_committed(bucket, place=place):
            if place < own:
                gone.append(place)
        elif verified >= keep:
            gone.append(place)
        elif looks_whole(bucket, place=place):
            verified += 1
    for place in gone:
        remove(bucket, place=place)
    return gone


def looks_whole(bucket: Bucket, *, place: Place) -> bool:
    """COMMIT, manifest and the parts' sizes fit; the digests were checked when the parts were written."""
    try:
        manifest = read_manifest(bucket, place=place)
        sizes = {entry.key: entry.size for entry in bucket.list(place.key)}
    except GkrError:
        return False
    return all(sizes.get(f"{place.key}/{part.file}") == part.bytes for part in manifest.parts)
