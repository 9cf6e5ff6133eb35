"""One rank's file: readable by any safetensors reader, believed only if size and digest match."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from spec.errors import DataError
from training.checkpoint.documents import Part
from training.checkpoint.parts import read_part, write_part

VECTORS = {"model": torch.arange(5, dtype=torch.float32), "ema": -torch.arange(5, dtype=torch.float32)}


def _written(folder: Path) -> Part:
    size, digest = write_part(folder / "p.safetensors", vectors=VECTORS)
    return Part(
        rank=0,
        file="p.safetensors",
        bytes=size,
        sha256=digest,
        vectors=["model", "ema"],
        ranges=[("a", 0, 2), ("b", 4, 3)],
    )


def test_a_part_returns_as_written_and_is_plain_safetensors(tmp_path: Path) -> None:
    part = _written(tmp_path)
    read, plain = read_part(tmp_path, part=part), safetensors.torch.load_file(tmp_path / part.file)
    assert all(read[name].equal(vector) and plain[name].equal(vector) for name, vector in VECTORS.items())


def test_a_part_of_a_rank_that_holds_nothing_is_a_file_all_the_same(tmp_path: Path) -> None:
    size, digest = write_part(tmp_path / "p", vectors={"model": torch.empty(0)})
    part = Part(rank=0, file="p", bytes=size, sha256=digest, vectors=["model"], ranges=[("a", 3, 0)])
    assert read_part(tmp_path, part=part)["model"].numel() == 0


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    part = _written(tmp_path)
    path = tmp_path / part.file
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        with pytest.raises(DataError, match="has the digest"):
            read_part(tmp_path, part=part)


def test_a_truncated_part_is_refused_by_its_size(tmp_path: Path) -> None:
    part = _written(tmp_path)
    (tmp_path / part.file).write_bytes((tmp_path / part.file).read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"has {part.bytes - 1} bytes, the manifest says {part.bytes}"):
        read_part(tmp_path, part=part)


def test_a_part_is_never_overwritten(tmp_path: Path) -> None:
    _written(tmp_path)
    with pytest.raises(FileExistsError):
        _written(tmp_path)
