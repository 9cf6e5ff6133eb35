"""Shards of encoded images: ordinary tar files, the same bytes each time, verified record by record."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.errors import DataError
from storage.index import ITEM
from storage.shard_files import OPEN_SHARDS, in_place
from storage.tar_shards import TarShards, TarShardWriter

TEXTS: list[dict[str, Any]] = [{"caption": f"Größe {n} é", "label": n} for n in range(5)]


def written(path: Path, *, count: int = 5) -> np.ndarray:
    rows = np.zeros(count, dtype=ITEM)
    with path.open("wb") as file:
        writer = TarShardWriter(file)
        for n in range(count):
            placed = writer.add(f"{n:08d}", image=bytes([n]) * (500 + n * 13), ending="jpg", text=TEXTS[n])
            rows[n] = (placed.offset, 0, placed.image_bytes, placed.text_bytes, placed.crc32, 7, 9)
        assert writer.finish() == file.tell()
    return rows


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_any_tool_opens_it_and_samples_are_read_at_random(tmp_path: Path) -> None:
    rows = written(tmp_path / "0.tar")
    with tarfile.open(tmp_path / "0.tar") as archive:
        names = archive.getnames()
        assert names[:4] == ["00000000.jpg", "00000000.json", "00000001.jpg", "00000001.json"]
        member = archive.extractfile("00000003.jpg")
        assert member is not None
        assert member.read() == b"\x03" * 539
    shards = TarShards(in_place([tmp_path / "0.tar"]))
    for n in (3, 0, 4):
        assert shards.read(rows[n]) == (bytes([n]) * (500 + n * 13), TEXTS[n])
    shards.close()


def test_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    written(tmp_path / "0.tar")
    os.utime(tmp_path / "0.tar", (0, 0))
    written(tmp_path / "1.tar")
    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes()


@pytest.mark.parametrize("damage", ["image", "text", "cut"])
def test_damage_is_met_where_it_is(tmp_path: Path, damage: str) -> None:
    rows = written(tmp_path / "0.tar")
    data = bytearray((tmp_path / "0.tar").read_bytes())
    at = int(rows[2]["offset"])
    if damage == "image":
        data[at + 5] ^= 1
    elif damage == "text":
        data[at + 1024 + 512 + 4] ^= 1
    else:
        del data[at + 100 :]
    (tmp_path / "0.tar").write_bytes(data)
    shards = TarShards(in_place([tmp_path / "0.tar"]))
    assert shards.read(rows[1])[1] == TEXTS[1]
    with pytest.raises(DataError, match=f"byte {at} is damaged"):
        shards.read(rows[2])
    shards.close()


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.tar" for n in range(OPEN_SHARDS + 20)]
    rows = written(paths[0])
    for path in paths[1:]:
        path.write_bytes(paths[0].read_bytes())
    shards = TarShards(in_place(paths))
    before = descriptors()
    for number in range(len(paths)):
        rows[1]["shard"] = number
        shards.read(rows[1])
    assert descriptors() - before <= OPEN_SHARDS
    shards.close()
    assert descriptors() == before


@pytest.mark.parametrize("key", ["", "a/b", "../x", "ü", "x" * 91, "a.b"])
def test_keys_that_no_reader_would_understand_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        TarShardWriter(io.BytesIO()).add(key, image=b"x", ending="jpg", text={})
