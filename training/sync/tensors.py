"""Writing safetensors so that equal content gives equal bytes.

The library orders metadata by a random hash, so the same state would get another digest in each process; it also
needs the whole file in memory. This writer sorts, streams and hashes on the way. Reading is left to the library,
which therefore also judges what is written here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.sync.layout import view_bytes

Point = Callable[[str], None]
"""Called with the name of each step that a crash may follow; tests crash there."""
_CHUNK = 8 << 20


def no_point(_: str) -> None:
    """Nothing happens between two steps, the normal case."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file that is durable under its final name."""

    path: Path
    sha256: str
    size: int


def write_tensors(
    tensors: Mapping[str, npt.NDArray[np.float32]],
    *,
    metadata: Mapping[str, str],
    temporary: Path,
    name: Callable[[str], Path],
    label: str,
    point: Point = no_point,
) -> Written:
    """Write float32 tensors to `temporary`, flush them to the disk, then rename to `name(sha256)`."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    position = 0
    for key in tensors:
        size = tensors[key].nbytes
        header[key] = {"dtype": "F32", "shape": list(tensors[key].shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            point(f"{label}-opened")
            for piece in (len(text).to_bytes(8, "little"), text):
                digest.update(piece)
                written += file.write(piece)
            for key in tensors:
                flat = view_bytes(np.ascontiguousarray(tensors[key], dtype="<f4"))
                for start in range(0, len(flat), _CHUNK):
                    digest.update(flat[start : start + _CHUNK])
                    written += file.write(flat[start : start + _CHUNK])
            file.flush()
            point(f"{label}-written")
            os.fsync(file.fileno())
        path = name(digest.hexdigest())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)
    point(f"{label}-named")
    return Written(path=path, sha256=digest.hexdigest(), size=written)


def sync_folder(folder: Path) -> None:
    """Make a rename inside the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
