"""Sample pictures of a run as PNG data URIs.

Files are read without pickle, only from inside the run's folder, and only as uint8 [count, height, width, channels]
with one or three channels. PNG is written here because the report needs nothing of an imaging library but this.
"""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

SIDES = (64, 48, 32, 24, 16)
"""Pictures are averaged down to at most so many pixels a side; the originals stay beside the report."""


class PixelsError(Exception):
    """A sample file cannot be shown; the message says why."""


def read_pixels(relative: str, *, folder: Path) -> Pixels:
    """The pictures of one file of the run."""
    root, path = folder.resolve(), (folder / relative).resolve()
    if not path.is_relative_to(root):
        raise PixelsError(f"{relative} lies outside of the run's folder")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise PixelsError(f"{relative} is missing") from None
    except (OSError, ValueError, EOFError) as error:
        raise PixelsError(f"{relative} is not a readable array: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] not in (1, 3):
        found = f"{getattr(array, 'dtype', type(array).__name__)} {list(getattr(array, 'shape', []))}"
        raise PixelsError(f"{relative} holds {found}, not uint8 [count, height, width, 1 or 3]")
    if 0 in array.shape:
        raise PixelsError(f"{relative} holds no pictures")
    return array


def shrink(image: Pixels, *, side: int) -> Pixels:
    """One picture [height, width, channels] averaged over whole blocks to at most `side` pixels a side."""
    factor = -(-max(image.shape[:2]) // side)
    if factor <= 1:
        return image
    height, width = (max(1, length // factor) for length in image.shape[:2])
    blocks = image[: height * factor, : width * factor].reshape(
        height, -1, width, min(factor, image.shape[1]), image.shape[2]
    )
    return blocks.mean(axis=(1, 3)).round().astype(np.uint8)


def data_uri(image: Pixels, *, side: int = SIDES[0]) -> str:
    """One picture [height, width, channels] as a PNG data URI, at most `side` pixels a side."""
    small = np.ascontiguousarray(shrink(image, side=side))
    height, width, channels = small.shape
    rows = small.reshape(height, width * channels)
    raw = np.concatenate([np.zeros((height, 1), dtype=np.uint8), rows], axis=1).tobytes()  # filter 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
