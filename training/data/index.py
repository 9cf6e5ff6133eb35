"""Where each sample of a dataset lies and how large its image is: fixed records that are mapped, not read.

A dataset of encoded images has one index beside its shards; its row number is the sample's id. The planner reads sizes
of a window at a time, a loader worker the rows of a batch, so a dataset of a billion samples costs neither of them
memory. numpy only: loader workers import this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec.errors import DataError
from spec.shard_bytes import REMEDY
from training.data.buckets import Bucket, assign

ITEM = np.dtype(
    [
        ("width", "<u2"),
        ("height", "<u2"),
        ("shard", "<u4"),
        ("offset", "<u8"),
        ("image_bytes", "<u4"),
        ("text_bytes", "<u4"),
    ]
)
"""Width and height after EXIF rotation, number of the shard, where the image's bytes begin in it and how many they are,
and the bytes of the JSON document behind it (0: none)."""
_CHUNK = 1 << 20


def open_index(path: Path, *, samples: int) -> NDArray[np.void]:
    """The records, mapped read-only. DataError if the file has not exactly so many."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"the dataset's index cannot be read: {error.strerror}", where=str(path), hint=REMEDY) from None
    if size != samples * ITEM.itemsize or not samples:
        raise DataError(
            f"the dataset's index has {size} bytes, {samples} samples need {samples * ITEM.itemsize}",
            where=str(path),
            hint=REMEDY,
        )
    return np.memmap(path, dtype=ITEM, mode="r", shape=(samples,))


def write_index(path: Path, *, rows: NDArray[np.void]) -> str:
    """Write all records; their sha256."""
    data = np.ascontiguousarray(rows, dtype=ITEM)
    data.tofile(path)
    return hashlib.sha256(data.view(np.uint8).data).hexdigest()


def bucket_codes(index: NDArray[np.void], *, buckets: Sequence[Bucket]) -> NDArray[np.uint8]:
    """Number of the bucket of each sample: one byte each, so that a plan can hold them for any dataset."""
    codes = np.empty(len(index), dtype=np.uint8)
    for first in range(0, len(index), _CHUNK):
        rows = index[first : first + _CHUNK]
        codes[first : first + _CHUNK] = assign(rows["width"], rows["height"], buckets=buckets)
    return codes
