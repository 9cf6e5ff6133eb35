"""Datasets in a folder that already holds others."""

from __future__ import annotations

from pathlib import Path

from services.prepare.__main__ import prepare
from spec.shards import Manifest


def made(path: Path) -> Manifest:
    manifest, _ = prepare(path.as_uri(), source="sklearn-digits", shard_samples=512, lock_timeout_seconds=30)
    return manifest


def test_a_second_manifest_of_the_same_content_leaves_the_shards_of_the_first_in_place(tmp_path: Path) -> None:
    """They were removed and written again: a reader just then missed one, and after a kill all were gone."""
    first = made(tmp_path / "first.json")
    paths = [tmp_path / one.path for one in [*first.splits.train, *first.splits.test]]
    before = [path.stat().st_ino for path in paths]
    assert made(tmp_path / "second.json").splits == first.splits
    assert [path.stat().st_ino for path in paths] == before
    paths[0].write_bytes(b"damaged")
    assert made(tmp_path / "third.json").splits == first.splits
    assert paths[0].stat().st_size == first.splits.train[0].bytes
