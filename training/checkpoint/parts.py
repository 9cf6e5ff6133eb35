"""One rank's file: flat float32 vectors as safetensors, hashed while they are written and before they are believed.

Written in pieces so that a large shard never lies in memory twice. Read whole: the bytes that were hashed are the bytes
that are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from spec.errors import DataError
from training.checkpoint.documents import Part

_PIECE_BYTES = 16 * 2**20
_ALIGNMENT = 8
_HINT = "an older checkpoint is used if there is one"


def write_part(path: Path, *, vectors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Create the file, make it durable, read it back; its size and sha256. The vectors are float32 on the CPU,
    contiguous and flat.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, vector in vectors.items():
        assert vector.dtype == torch.float32
        assert vector.is_contiguous()
        header[name] = {"dtype": "F32", "shape": [vector.numel()], "data_offsets": [end, end + 4 * vector.numel()]}
        end += 4 * vector.numel()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for block in (
            len(text).to_bytes(8, "little"),
            text,
            *(vector.numpy().data.cast("B") for vector in vectors.values()),
        ):
            for first in range(0, len(block), _PIECE_BYTES):
                piece = block[first : first + _PIECE_BYTES]
                file.write(piece)
                digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    size = 8 + len(text) + end
    if (path.stat().st_size, _file_digest(path)) != (size, digest.hexdigest()):
        raise DataError("the file reads back other bytes than were written", where=str(path), hint="check the storage")
    return size, digest.hexdigest()


def read_part(folder: Path, *, part: Part) -> dict[str, Tensor]:
    """The vectors of a part whose size and digest match the manifest; DataError or OSError otherwise."""
    path = folder / part.file
    size = path.stat().st_size
    if size != part.bytes:
        raise DataError(f"{part.file} has {size} bytes, the manifest says {part.bytes}", where=str(folder), hint=_HINT)
    data = bytearray(size)
    with path.open("rb") as file:
        read = file.readinto(data)
    digest = hashlib.sha256(data).hexdigest()
    if read != size or digest != part.sha256:
        wanted = part.sha256[:12]
        raise DataError(
            f"{part.file} has the digest {digest[:12]}.., the manifest says {wanted}..", where=str(folder), hint=_HINT
        )
    begin = 8 + int.from_bytes(data[:8], "little")
    header = cast("dict[str, dict[str, Any]]", json.loads(data[8:begin]))
    elements = sum(length for _, _, length in part.ranges)
    vectors: dict[str, Tensor] = {}
    for name in part.vectors:
        first, last = header[name]["data_offsets"]
        assert last - first == 4 * elements, f"{part.file} was written with other ranges than its receipt says"
        offset = begin + first
        vectors[name] = (
            torch.frombuffer(data, dtype=torch.float32, count=elements, offset=offset) if elements else torch.empty(0)
        )
    return vectors


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
