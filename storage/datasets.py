"""Datasets of any store, as files of this machine.

Evaluation and preflight read files and nothing else. `local_manifest` gives them a `file:` URI: of the dataset itself
if it is a folder, else of links to copies in the node's cache (`storage.cache`). Loaders take the manifest and the
index this way and let `storage.shard_files` bring the shards. Promises: a file under its final name was verified
against the manifest; each object is fetched by one process at a time; only what is asked for is fetched. Standard
library and `spec` only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spec.errors import DataError
from spec.shard_bytes import REMEDY
from spec.shards import Manifest, Shard, Split, open_manifest, parse_manifest, path_of
from storage.cache import MANIFEST, Cache, Wanted
from storage.errors import MissingError, missing_shard
from storage.folder import appearing, file_errors
from storage.shard_files import HASHED_BYTES, Origin, ShardFile
from storage.uris import file_path, open_bucket, split_uri

SPLITS: tuple[Split, ...] = ("train", "test")
_held: dict[str, int] = {}
"""What `local_manifest` brought stays until this process ends: descriptors by path."""


def read_manifest(uri: str) -> Manifest:
    """The manifest at a URI of any store, verified; DataError if it is missing or damaged."""
    return open_manifest(uri) if file_path(uri) is not None else parse_manifest(_get(uri), where=uri)


def local_manifest(uri: str, *, cache: Path | None = None, splits: Sequence[Split] = SPLITS) -> str:
    """A `file:` URI of the same dataset; the index and the shards of `splits` are there until this process ends."""
    if file_path(uri) is not None:
        return uri
    data = _get(uri)
    manifest = parse_manifest(data, where=uri)
    path = (cache or default_cache()) / "datasets" / manifest.digest / MANIFEST
    if not path.exists() or path.read_bytes() != data:
        with appearing(path) as temporary:
            temporary.write_bytes(data)
    wanted = [shard for split in splits for shard in manifest.shards(split)]
    if manifest.index is not None:
        wanted.append(manifest.index)
    for shard in wanted:
        file = path.parent / shard.path
        if str(file) not in _held or not file.exists():  # a copy that was found damaged is gone
            _held[str(file)] = _hold(uri, shard, local=path.as_uri())
    return path.as_uri()


@contextmanager
def held_shards(uri: str, *, shards: Iterable[Shard], local: str) -> Generator[None]:
    """While the block runs, more shards of the dataset at `uri` are where its local manifest is."""
    with ExitStack() as held:
        for shard in shards if uri != local else ():
            held.callback(os.close, _hold(uri, shard, local=local))
        yield


def verify_file(shard: Shard, *, local: str) -> None:
    """DataError unless a file of a dataset on this machine has the bytes that its manifest says."""
    path = path_of(local).parent / shard.path
    try:
        size, sha256 = open_bucket(path_of(local).parent.as_uri()).digest(shard.path)
    except MissingError as error:
        raise missing_shard(str(path)) from error
    if (size, sha256) != (shard.bytes, shard.sha256):
        raise DataError(
            f"the shard is corrupt: {size} bytes, sha256 {sha256[:12]}; the manifest says {shard.bytes},"
            f" {shard.sha256[:12]}",
            where=str(path),
            hint=REMEDY,
        )


def shard_files(shards: Iterable[Shard], *, folder: Path) -> tuple[ShardFile, ...]:
    """Files of a dataset as they are read at random; `folder`: of its local manifest."""
    return tuple(ShardFile(str(folder / one.path), one.samples, one.bytes, one.sha256, key=one.path) for one in shards)


def origin_of(uri: str, *, local: str) -> Origin | None:
    """Where the shards of the dataset at `uri` come from; none if they are on this machine."""
    return None if uri == local else Origin(split_uri(uri)[0], str(_cache_of(local)), path_of(local).parent.name)


@dataclass(frozen=True)
class CachedDataset:
    """What a node's cache has of one dataset."""

    digest: str
    name: str
    objects: int
    """Files of the dataset: shards, index, features."""
    copies: int
    """How many of them are here."""
    bytes: int
    """Of these copies; what two datasets share counts for both."""
    used: float
    """When one of them was opened last; seconds since 1970."""
    in_use: bool


def cached_datasets(cache: Cache) -> list[CachedDataset]:
    """All datasets of which there are copies, the most recently used first."""
    copies = {one.sha256: one for one in cache.copies()}
    found: list[CachedDataset] = []
    for path in cache.root.glob(f"datasets/*/{MANIFEST}"):
        try:
            manifest, digest = open_manifest(path.as_uri()), path.parent.name
        except DataError:  # a crash of the machine left it damaged; who uses the dataset next writes it anew
            continue
        files = [
            *manifest.splits.train,
            *manifest.splits.test,
            *(file for one in manifest.features for file in one.files),
        ]
        files += [manifest.index] if manifest.index is not None else []
        here = [copies[one.sha256] for one in files if one.sha256 in copies]
        if here:
            size, used = sum(one.bytes for one in here), max(one.used for one in here)
            in_use = cache.is_used(digest)
            found.append(CachedDataset(digest, manifest.name, len(files), len(here), size, used, in_use))
    return sorted(found, key=lambda one: -one.used)


def default_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The node's folder for copies: GKR_DATA_CACHE; in a pod its run's folder, whose disk the node gives to pods."""
    named, run = environment.get("GKR_DATA_CACHE"), environment.get("GKR_RUN_DIR")
    if named:
        return Path(named).absolute()
    if run and environment.get("GKR_ROLE"):
        return Path(run) / "data"
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gkr" / "data"


def _hold(uri: str, shard: Shard, *, local: str) -> int:
    """A descriptor that keeps the copy of a shard, and its link beside the local manifest."""
    folder, bucket = _cache_of(local), open_bucket(split_uri(uri)[0])
    cache, wanted = Cache(folder), Wanted(shard.path, shard.bytes, shard.sha256)
    descriptor = cache.hold(wanted, bucket=bucket)
    if shard.bytes <= HASHED_BYTES and _digest(descriptor) != shard.sha256:
        cache.discard(wanted, descriptor=descriptor)
        os.close(descriptor)
        descriptor = cache.hold(wanted, bucket=bucket)
    link, target = path_of(local).parent / shard.path, cache.path(shard.sha256)
    with file_errors(link), suppress(FileExistsError):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))
    return descriptor


def _digest(descriptor: int) -> str:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_of(local: str) -> Path:
    """The cache that holds a local manifest."""
    return path_of(local).parent.parent.parent


def _get(uri: str) -> bytes:
    folder, name = split_uri(uri)
    try:
        return open_bucket(folder).get(name).data
    except MissingError as error:
        raise DataError("the dataset's manifest does not exist", where=uri, hint=REMEDY) from error
