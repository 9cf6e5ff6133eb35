"""Proof that a dataset is whole: every byte of every shard against the manifest, every sample in one place only.

Preflight reads one shard of each split (`shards=1`); the full audit reads all. Nothing is repaired here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spec.errors import DataError
from spec.shards import Split, open_manifest, read_shard
from storage.datasets import fetch_shards, local_manifest


@dataclass(frozen=True)
class Audit:
    """What was read and found good."""

    digest: str
    shards: int
    samples: int
    bytes: int


def audit(manifest_uri: str, *, shards: int | None = None, cache: Path | None = None) -> Audit:
    """Read at most `shards` shards of each split (default: all); a DataError names the first that is wrong.

    `cache`: where the shards of a dataset that is not on this machine are copied to.
    """
    local = local_manifest(manifest_uri, cache=cache, splits=())
    manifest = open_manifest(local)
    seen: dict[int, str] = {}
    read, size = 0, 0
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        for shard in manifest.shards(split)[:shards]:
            fetch_shards(manifest_uri, shards=[shard], local=local)
            for sample in read_shard(shard, uri=local, manifest=manifest):
                if sample.id in seen:
                    raise DataError(
                        f"sample {sample.id} is in {seen[sample.id]} and again in {shard.path}",
                        where=manifest_uri,
                        hint="a sample in both splits would be trained on and judged by; prepare the dataset again",
                    )
                seen[sample.id] = shard.path
            read, size = read + 1, size + shard.bytes
    return Audit(manifest.digest, read, len(seen), size)
