"""Shards of encoded images: plain tar files that any tool opens, read at random through the dataset's index.

A sample is two members, `KEY.jpg` (or png, webp) and right behind it `KEY.json` with its caption and what else is known
of it, which is what WebDataset readers expect. Headers hold no time, owner or rights of the machine that wrote them, so
equal samples give equal bytes. A record is verified by its CRC-32 each time it is read; nothing is mapped, so a file
that is cut off under a running job gives an error and not a bus error. Standard library and numpy only: loader workers
import this module.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from spec.errors import DataError
from spec.shard_bytes import REMEDY
from storage.shard_files import ShardFiles

BLOCK = 512
MAX_KEY = 90
"""Characters of a key: with the longest ending it fits the name field of a tar header."""


class DamagedError(DataError):
    """The bytes of one sample are not those that were written. Others can be read."""


@dataclass(frozen=True)
class Placed:
    """Where a sample was written; the fields of its row in the index."""

    offset: int
    image_bytes: int
    text_bytes: int
    crc32: int


class TarShardWriter:
    """Writes one shard to an open file: from its beginning, or behind the `size` bytes and `samples` it holds."""

    def __init__(self, file: BinaryIO, *, size: int = 0, samples: int = 0) -> None:
        self._file = file
        self.size = size
        self.samples = samples

    def add(self, key: str, *, image: bytes, ending: str, text: dict[str, Any]) -> Placed:
        """Append one sample. `ending`: jpg, png or webp. Raises ValueError for a key that no tar can hold."""
        if not key or len(key) > MAX_KEY or not key.isascii() or not key.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"key {key!r}: 1 to {MAX_KEY} letters, digits, - and _")
        document = json.dumps(text, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
        self._member(f"{key}.{ending}", image)
        offset = self.size - len(image) - _padding(len(image))
        self._member(f"{key}.json", document)
        self.samples += 1
        return Placed(offset, len(image), len(document), zlib.crc32(document, zlib.crc32(image)))

    def finish(self) -> int:
        """Write the end of the archive; the size of the whole."""
        self._write(bytes(2 * BLOCK))
        return self.size

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o644
        self._write(info.tobuf(tarfile.USTAR_FORMAT))
        self._write(data + bytes(_padding(len(data))))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)


class TarShards:
    """Random access to the samples of a list of shards."""

    def __init__(self, files: ShardFiles) -> None:
        self._files = files

    def expect(self, rows: Iterable[np.void]) -> None:
        """Told which rows of the index will be read next."""
        self._files.expect((int(row["shard"]), int(row["offset"]), _record_bytes(row)) for row in rows)

    def read(self, row: np.void) -> tuple[bytes, dict[str, Any]]:
        """Image and text of one row of the index. DamagedError if it is not what was written."""
        try:
            return self._read(row)
        except DamagedError:
            if not self._files.renew(int(row["shard"])):
                raise
            return self._read(row)

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _read(self, row: np.void) -> tuple[bytes, dict[str, Any]]:
        number, offset, image_bytes = int(row["shard"]), int(row["offset"]), int(row["image_bytes"])
        size = _record_bytes(row)
        data = self._files.read(number, offset=offset, size=size)
        image, text = data[:image_bytes], data[size - int(row["text_bytes"]) :]
        if len(data) != size or zlib.crc32(text, zlib.crc32(image)) != int(row["crc32"]):
            where = self._files.shards[number].path
            raise DamagedError(f"the sample at byte {offset} is damaged", where=where, hint=REMEDY)
        found: dict[str, Any] = json.loads(bytes(text))
        return bytes(image), found


def _record_bytes(row: np.void) -> int:
    """From the beginning of the image to the end of the text behind it."""
    image_bytes = int(row["image_bytes"])
    return image_bytes + _padding(image_bytes) + BLOCK + int(row["text_bytes"])


def _padding(size: int) -> int:
    return -size % BLOCK
