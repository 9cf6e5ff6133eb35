"""Where each sample of a dataset of encoded images lies, and how large its image is: fixed records that are mapped.

There is one index beside the shards; its row number is the sample's id. The planner looks at the sizes of a window at a
time, a loader worker at the rows of a batch, so a dataset of a billion samples costs neither of them memory. numpy
only: loader workers import this module.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spec.errors import DataError
from spec.shard_bytes import REMEDY

ITEM = np.dtype(
    [
        ("offset", "<u8"),
        ("shard", "<u4"),
        ("image_bytes", "<u4"),
        ("text_bytes", "<u4"),
        ("crc32", "<u4"),
        ("width", "<u2"),
        ("height", "<u2"),
    ]
)
"""28 bytes: where the image begins in its shard, the number of the shard, the length of the image and of the JSON
document behind it, CRC-32 of both, width and height after EXIF rotation."""


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
