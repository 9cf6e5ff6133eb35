"""One rank's file: flat float32 vectors as safetensors, hashed while they are written and before they are believed.

Written in pieces so that a large shard never lies in memory twice. Read whole: the bytes that were hashed are the bytes
that are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from spec.errors import DataError
from storage import Bucket, Bytes, ExistsError
from storage.protocol import PIECE_BYTES
from training.checkpoint.documents import Part
from training.checkpoint.store import shown

_ALIGNMENT = 8
_HINT = "an older checkpoint is used if there is one"


def write_part(bucket: Bucket, key: str, *, vectors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Create the file, make it durable, read it back; its size and sha256. The vectors are float32 on the CPU,
    contiguous and flat.
    """
    if bucket.exists(key):
        raise ExistsError("this part is there already", where=shown(bucket, key))
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

    def pieces() -> Iterator[Bytes]:
        blocks = (vector.numpy().data.cast("B") for vector in vectors.values() if vector.numel())
        for block in (len(text).to_bytes(8, "little"), text, *blocks):
            for first in range(0, len(block), PIECE_BYTES):
                piece = block[first : first + PIECE_BYTES]
                digest.update(piece)
                yield piece

    bucket.write(key, pieces())
    size = 8 + len(text) + end
    if bucket.digest(key) != (size, digest.hexdigest()):
        raise DataError(
            "the file reads back other bytes than were written", where=shown(bucket, key), hint="check the storage"
        )
    return size, digest.hexdigest()


def read_part(bucket: Bucket, folder: str, *, part: Part) -> dict[str, Tensor]:
    """The vectors of a part whose size and digest match the manifest; DataError otherwise."""
    data = bucket.read(f"{folder}/{part.file}")
    where = shown(bucket, folder)
    if len(data) != part.bytes:
        raise DataError(
            f"{part.file} has {len(data)} bytes, the manifest says {part.bytes}", where=where, hint=_HINT
        )  # fmt: skip
    digest = hashlib.sha256(data).hexdigest()
    if digest != part.sha256:
        wanted = part.sha256[:12]
        raise DataError(
            f"{part.file} has the digest {digest[:12]}.., the manifest says {wanted}..", where=where, hint=_HINT
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
