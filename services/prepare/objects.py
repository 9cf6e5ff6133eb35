"""Puts a dataset in a bucket, whole or not at all.

Shards have names that are their content's, so preparers that run at once write the same bytes to the same places. The
manifest is created last and never overwritten: the first preparer's counts, the later ones find the dataset there.
"""

from __future__ import annotations

from services.prepare.packing import Content, Packed, refuse_other
from spec.errors import DataError
from spec.shard_bytes import REMEDY
from spec.shards import Manifest
from storage import Bucket, ExistsError, MissingError, open_bucket, split_uri
from storage.datasets import read_manifest


def find(uri: str, *, content: Content) -> Manifest | None:
    """The dataset that is already there, its shards read back; none if there is none."""
    folder, name = split_uri(uri)
    bucket = open_bucket(folder)
    if not bucket.exists(name):
        return None
    manifest = read_manifest(uri)
    refuse_other(manifest, content=content, where=uri)
    for shard in [*manifest.splits.train, *manifest.splits.test]:
        _verify(bucket, shard.path, size=shard.bytes, sha256=shard.sha256)
    return manifest


def write(uri: str, *, content: Content, packed: Packed) -> tuple[Manifest, bool]:
    """Write a dataset; it, and whether another preparer was faster."""
    folder, name = split_uri(uri)
    bucket = open_bucket(folder)
    for file in packed.files:
        key = f"{packed.folder}/{file.name}"
        bucket.put(key, file.data)
        _verify(bucket, key, size=len(file.data), sha256=file.sha256)
    try:
        bucket.create(name, packed.manifest.write_json().encode() + b"\n")
    except ExistsError:
        found = find(uri, content=content)
        if found is None:
            raise
        return found, True
    return packed.manifest, False


def _verify(bucket: Bucket, key: str, *, size: int, sha256: str) -> None:
    where = f"{bucket.uri}/{key}"
    try:
        found = bucket.digest(key)
    except MissingError as error:
        raise DataError("a shard of the dataset does not exist", where=where, hint=REMEDY) from error
    if found != (size, sha256):
        raise DataError(
            f"the shard is corrupt: {found[0]} bytes, sha256 {found[1][:12]}; expected {size}, {sha256[:12]}",
            where=where,
            hint=REMEDY,
        )
