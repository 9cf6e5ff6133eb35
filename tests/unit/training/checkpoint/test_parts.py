"""One rank's file: readable by any safetensors reader, believed only if size and digest match."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from spec.errors import DataError
from storage import Bucket, Bytes, ExistsError
from storage.folder import Folder
from storage.protocol import PIECE_BYTES
from tests.unit.training.checkpoint.conftest import flip, truncate
from training.checkpoint.documents import Part
from training.checkpoint.parts import read_part, write_part

VECTORS = {"model": torch.arange(5, dtype=torch.float32), "ema": -torch.arange(5, dtype=torch.float32)}


def _written(bucket: Bucket) -> Part:
    size, digest = write_part(bucket, "f/p.safetensors", vectors=VECTORS)
    return Part(
        rank=0,
        file="p.safetensors",
        bytes=size,
        sha256=digest,
        vectors=["model", "ema"],
        ranges=[("a", 0, 2), ("b", 4, 3)],
    )


def test_a_part_returns_as_written_and_is_plain_safetensors(saved: Bucket) -> None:
    part = _written(saved)
    read, plain = read_part(saved, "f", part=part), safetensors.torch.load(saved.get(f"f/{part.file}").data)
    assert all(read[name].equal(vector) and plain[name].equal(vector) for name, vector in VECTORS.items())


def test_a_part_of_a_rank_that_holds_nothing_is_a_file_all_the_same(saved: Bucket) -> None:
    size, digest = write_part(saved, "f/p", vectors={"model": torch.empty(0)})
    part = Part(rank=0, file="p", bytes=size, sha256=digest, vectors=["model"], ranges=[("a", 3, 0)])
    assert read_part(saved, "f", part=part)["model"].numel() == 0


def test_every_flipped_bit_is_seen(saved: Bucket) -> None:
    part = _written(saved)
    for place in range(0, part.bytes, 7):
        flip(saved, f"f/{part.file}", place=place)
        with pytest.raises(DataError, match="has the digest"):
            read_part(saved, "f", part=part)
        flip(saved, f"f/{part.file}", place=place)
    assert read_part(saved, "f", part=part)


def test_a_truncated_part_is_refused_by_its_size(saved: Bucket) -> None:
    part = _written(saved)
    truncate(saved, f"f/{part.file}", by=1)
    with pytest.raises(DataError, match=rf"has {part.bytes - 1} bytes, the manifest says {part.bytes}"):
        read_part(saved, "f", part=part)


def test_a_part_of_several_pieces_returns_as_written(saved: Bucket) -> None:
    vectors = {name: torch.rand(3 * 2**20, generator=torch.Generator().manual_seed(7)) for name in ("model", "ema")}
    size, digest = write_part(saved, "f/p", vectors=vectors)
    assert size > PIECE_BYTES
    part = Part(rank=0, file="p", bytes=size, sha256=digest, vectors=["model", "ema"], ranges=[("a", 0, 3 * 2**20)])
    read = read_part(saved, "f", part=part)
    assert all(read[name].equal(vector) for name, vector in vectors.items())


def test_a_part_is_never_overwritten(saved: Bucket) -> None:
    _written(saved)
    with pytest.raises(ExistsError):
        _written(saved)


def test_what_reads_back_otherwise_is_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes all bytes and loses the last one."""
    bucket = Folder(tmp_path)
    write = bucket.write

    def lossy(key: str, pieces: Iterable[Bytes]) -> int:
        size = write(key, pieces)
        os.truncate(tmp_path / key, size - 1)
        return size

    monkeypatch.setattr(bucket, "write", lossy)
    with pytest.raises(DataError, match="reads back other bytes"):
        _written(bucket)
