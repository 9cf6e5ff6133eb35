"""From an encoded image to pixels of a wanted size, in place; and why an image cannot be used.

Promises: pixels and size follow EXIF orientation; transparency is laid on white; 16-bit, grey, palette and CMYK images
become 8-bit RGB (or grey, if one channel is wanted); the result depends on the bytes and the arguments alone. Nothing
is decoded before its size was looked at, so a small file cannot take much memory. What cannot be used raises
`ImageProblem` with a stable word: the caller decides what takes its place. Decoding releases the GIL. Pillow and numpy
only: loader workers import this module.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 128 * 2**20
"""Of the encoded image: 128 Mpx take 512 MiB as RGBA."""
MAX_SIDE = 2**16 - 1
SMALLEST_GAP = 2.0
"""Large reductions go through an integer reduction to at least so many times the wanted size first."""
_SWAPPED = frozenset({5, 6, 7, 8})
"""EXIF orientations that exchange width and height."""
_ORIENTATION = 0x0112

ImageFile.LOAD_TRUNCATED_IMAGES = False


class ImageProblem(Exception):  # noqa: N818 - a property of the data, not a failure of ours
    """Why an image cannot be used."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """format, truncated, damaged, bomb, empty, animated or small."""
        self.message = message


def size_of(data: bytes | memoryview) -> tuple[int, int]:
    """(width, height) as a person sees the image, without decoding it."""
    image = _open(data)
    width, height = image.size
    return (height, width) if _orientation(image) in _SWAPPED else (width, height)


def decode_into(
    out: NDArray[np.uint8], data: bytes | memoryview, *, across: float = 0.5, down: float = 0.5, upscale: float = 2.0
) -> None:
    """Fill `out` [height, width, channels] (3: RGB, 1: grey) with the largest crop that has its aspect.

    `across`, `down` in [0, 1]: where the crop lies, 0 is left or top. `upscale`: most that an image may be enlarged;
    a smaller one raises `ImageProblem` ("small").
    """
    height, width, channels = out.shape
    image = _open(data)
    orientation = _orientation(image)
    swapped = orientation in _SWAPPED
    seen = (image.height, image.width) if swapped else image.size
    if width > upscale * seen[0] or height > upscale * seen[1]:
        raise ImageProblem("small", f"{seen[0]} x {seen[1]} pixels are too few for {width} x {height}")
    if image.format == "JPEG":
        # The decoder itself can halve, quarter and so on; it never goes below what is asked for.
        wanted = (height, width) if swapped else (width, height)
        image.draft(None, (int(wanted[0] * SMALLEST_GAP), int(wanted[1] * SMALLEST_GAP)))
    _load(image)
    # `exif_transpose` copies an image that is upright as well, which takes half as long as decoding it.
    upright = image if orientation == 1 else ImageOps.exif_transpose(image)
    flat = _flatten(upright, mode="RGB" if channels == 3 else "L")
    out[...] = _crop(flat, width=width, height=height, across=across, down=down).reshape(out.shape)


def _open(data: bytes | memoryview) -> Any:
    if not len(data):
        raise ImageProblem("empty", "there are no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own warning of large images; ours is an error
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageProblem("format", f"not a {', '.join(FORMATS)} image") from None
    except Image.DecompressionBombError as error:
        raise ImageProblem("bomb", str(error)) from None
    except (OSError, SyntaxError, ValueError, struct.error, EOFError, OverflowError) as error:
        raise ImageProblem("damaged", f"its header cannot be read: {error}") from None
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ImageProblem("bomb", f"{width} x {height} pixels, at most {MAX_PIXELS} are decoded")
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise ImageProblem("animated", f"it has {frames} frames")
    return image


def _orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except (OSError, SyntaxError, ValueError, TypeError, struct.error, KeyError):
        return 1  # a broken EXIF block says nothing about how the image is to be held


def _load(image: Any) -> None:
    try:
        image.load()
    except (OSError, SyntaxError, ValueError, struct.error, EOFError, IndexError, zlib.error) as error:
        reason = "truncated" if "truncated" in str(error) else "damaged"
        raise ImageProblem(reason, f"it cannot be decoded: {error}") from None


def _flatten(image: Any, *, mode: str) -> Any:
    """8 bits per channel, without transparency."""
    if image.mode in ("I;16", "I;16L", "I;16B", "I;16N", "I"):
        deep = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(np.minimum((deep + 128) // 257, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, clear)
    return image if image.mode == mode else image.convert(mode)


def _crop(image: Any, *, width: int, height: int, across: float, down: float) -> NDArray[np.uint8]:
    """The largest crop of an aspect, scaled to its size; on whole pixels if it needs no scaling.

    Resampling between pixels would blur it, and take longer than decoding.
    """
    over = (image.width - width, image.height - height)
    if min(over) == 0:
        left, top = round(over[0] * across), round(over[1] * down)
        return np.asarray(image, dtype=np.uint8)[top : top + height, left : left + width]
    aspect = width / height
    wide, high = min(image.width, image.height * aspect), min(image.height, image.width / aspect)
    x, y = (image.width - wide) * across, (image.height - high) * down
    box = (x, y, x + wide, y + high)
    small = image.resize((width, height), Image.Resampling.LANCZOS, box=box, reducing_gap=SMALLEST_GAP)
    return np.asarray(small, dtype=np.uint8)
