"""Datasets of any store, as files of this machine.

Loaders, evaluation and preflight read files and nothing else. `local_manifest` gives them a `file:` URI: of the dataset
itself if it is a folder, else of a copy by content in `cache`, which all processes of a machine share. Promises: a file
under its final name was verified against the manifest; each object is fetched by one process at a time; only what is
asked for is fetched. Standard library and `spec` only.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from spec.errors import DataError, UnreachableError
from spec.shard_bytes import REMEDY
from spec.shards import Manifest, Shard, Split, open_manifest, parse_manifest, path_of
from storage.errors import MissingError
from storage.folder import appearing
from storage.protocol import Bucket
from storage.uris import file_path, open_bucket, split_uri

SPLITS: tuple[Split, ...] = ("train", "test")
FETCH_SECONDS = 1800.0
"""Longest wait for another process that fetches the same object."""
_POLL_SECONDS = 0.05
_NAME = "manifest.json"


def read_manifest(uri: str) -> Manifest:
    """The manifest at a URI of any store, verified; DataError if it is missing or damaged."""
    return open_manifest(uri) if file_path(uri) is not None else _parse(uri, _get(uri))


def local_manifest(uri: str, *, cache: Path | None = None, splits: Sequence[Split] = SPLITS) -> str:
    """A `file:` URI of the same dataset; the shards of `splits` and the index are there."""
    if file_path(uri) is not None:
        return uri
    data = _get(uri)
    manifest = _parse(uri, data)
    folder = (cache or default_cache()) / manifest.digest
    path = folder / _NAME
    if not path.exists():
        with appearing(path) as temporary:
            temporary.write_bytes(data)
    wanted = [shard for split in splits for shard in manifest.shards(split)]
    if manifest.index is not None:
        wanted.append(manifest.index)
    fetch_shards(uri, shards=wanted, local=path.as_uri())
    return path.as_uri()


def fetch_shards(uri: str, *, shards: Iterable[Shard], local: str) -> None:
    """Bring more shards of the dataset at `uri` to where its local manifest is."""
    if uri == local:
        return
    folder, bucket = path_of(local).parent, open_bucket(split_uri(uri)[0])
    for shard in shards:
        path = folder / shard.path
        if not path.exists():
            _fetch(bucket, shard=shard, path=path)


def verify_file(shard: Shard, *, local: str) -> None:
    """DataError unless a file of a dataset on this machine has the bytes that its manifest says."""
    path = path_of(local).parent / shard.path
    try:
        size, sha256 = open_bucket(path_of(local).parent.as_uri()).digest(shard.path)
    except MissingError as error:
        raise DataError("a shard of the dataset does not exist", where=str(path), hint=REMEDY) from error
    if (size, sha256) != (shard.bytes, shard.sha256):
        raise DataError(
            f"the shard is corrupt: {size} bytes, sha256 {sha256[:12]}; the manifest says {shard.bytes},"
            f" {shard.sha256[:12]}",
            where=str(path),
            hint=REMEDY,
        )


def default_cache() -> Path:
    """The machine's folder for copies of datasets: in a pod inside the run's folder, which all its processes share."""
    run = os.environ.get("GKR_RUN_DIR")
    return Path(run) / "data" if run else Path(tempfile.gettempdir()) / f"gkr-data-{os.getuid()}"


def _fetch(bucket: Bucket, *, shard: Shard, path: Path) -> None:
    with _locked(path):
        if path.exists():
            return
        try:
            bucket.fetch(shard.path, path, sha256=shard.sha256)
        except MissingError as error:
            raise DataError("a shard of the dataset does not exist", where=error.where, hint=REMEDY) from error
        except DataError as error:
            raise DataError(f"a shard of the dataset: {error.message}", where=error.where, hint=REMEDY) from error


def _get(uri: str) -> bytes:
    folder, name = split_uri(uri)
    try:
        return open_bucket(folder).get(name).data
    except MissingError as error:
        raise DataError("the dataset's manifest does not exist", where=uri, hint=REMEDY) from error


def _parse(uri: str, data: bytes) -> Manifest:
    return parse_manifest(data, where=uri)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Be the only one who fetches this file; the kernel releases the lock with its holder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + FETCH_SECONDS
    with path.with_name(f".{path.name}.lock").open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UnreachableError(
                        f"another process has been fetching this file for {FETCH_SECONDS:g} s",
                        where=str(path),
                        hint=f"see who: fuser -v {path.parent}; end it if it hangs",
                    ) from None
                time.sleep(_POLL_SECONDS)
        yield
