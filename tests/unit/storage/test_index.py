"""The index of a dataset: fixed records, refused unless exactly as long as it should be."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from spec.errors import DataError
from storage.index import ITEM, open_index, write_index


def rows(count: int) -> np.ndarray:
    found = np.zeros(count, dtype=ITEM)
    found["width"], found["height"] = np.arange(count) + 64, 64
    found["offset"] = np.arange(count) * 2**33
    return found


def test_what_was_written_is_read_back_and_named_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "index"
    digest = write_index(path, rows=rows(100))
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_size == 2800
    found = open_index(path, samples=100)
    assert found.tobytes() == rows(100).tobytes()
    assert not found.flags.writeable


@pytest.mark.parametrize("samples", [99, 101, 0])
def test_another_length_is_refused(tmp_path: Path, samples: int) -> None:
    write_index(tmp_path / "index", rows=rows(100))
    with pytest.raises(DataError, match="2800 bytes"):
        open_index(tmp_path / "index", samples=samples)


def test_a_missing_index_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file") as refused:
        open_index(tmp_path / "index", samples=1)
    assert str(tmp_path) in str(refused.value)
