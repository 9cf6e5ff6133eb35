"""What becomes of one sample: kept with everything that is to be known of it, or dropped with a reason.

An image is decoded in full before it is kept, so a dataset holds none that a trainer cannot decode; its bytes are kept
as they are. Equal bytes and rules give equal results. Threads may call `examine` at once: decoding releases the GIL,
and only one very large image is decoded at a time, which bounds the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from spec.preparation import PrepareRules
from spec.shard_bytes import MAX_CAPTION_BYTES
from storage.images import ImageProblem, decode_into, size_of
from storage.sources import MAX_TEXT_BYTES, Damage, Raw

LARGE_PIXELS = 32 * 2**20
MOST_ENLARGED = 2.0
"""For latents: what `decode_into` allows."""
_LARGE = threading.Lock()
_HASH_SIDE = 8


@dataclass(frozen=True)
class Dropped:
    """A sample that is not in the dataset."""

    where: str
    reason: str
    """A stable word: those of `storage.sources.Damage` and `storage.images.ImageProblem`, and small, aspect,
    no-caption, long-caption, bad-text, duplicate, near-duplicate, not-encoded."""
    message: str


@dataclass(frozen=True)
class Kept:
    """A sample that can be used, before it is compared with others."""

    where: str
    image: bytes
    ending: str
    width: int
    height: int
    text: dict[str, Any]
    pixels: bytes
    """16 bytes that name size and pixels."""
    look: int
    """Difference hash, see `look_of`."""

    @property
    def caption(self) -> str:
        """Empty if there is none."""
        return str(self.text.get("caption", ""))


def examine(item: Raw | Damage, *, rules: PrepareRules) -> Kept | Dropped:
    """Judge one sample by itself."""
    if isinstance(item, Damage):
        return Dropped(item.where, item.reason, item.message)
    try:
        text = _text_of(item, rules=rules)
        width, height = size_of(item.image)
        _refuse_size(width, height, rules=rules)
        pixels = _decoded(item.image, width=width, height=height)
    except ImageProblem as problem:
        return Dropped(item.where, problem.reason, problem.message)
    return Kept(
        where=item.where,
        image=item.image,
        ending=_ending(item.image),
        width=width,
        height=height,
        text=text,
        pixels=digest_of(pixels),
        look=look_of(pixels),
    )


def digest_of(pixels: NDArray[np.uint8]) -> bytes:
    """16 bytes that name size and pixels of an image [height, width, channels]."""
    digest = hashlib.sha256(str(pixels.shape).encode())
    digest.update(pixels.data)
    return digest.digest()[:16]


def look_of(pixels: NDArray[np.uint8]) -> int:
    """The difference hash of an image [height, width, 3]: 64 bits, each says if a cell of 9 x 8 is darker than its
    right neighbour.

    0 for an image without any brightness gradient, which says nothing about what it looks like.
    """
    cells = Image.fromarray(pixels).convert("L").resize((_HASH_SIDE + 1, _HASH_SIDE), Image.Resampling.BOX)
    grey = np.asarray(cells)
    return int.from_bytes(np.packbits(grey[:, :-1] < grey[:, 1:]).tobytes())


def _decoded(image: bytes, *, width: int, height: int) -> NDArray[np.uint8]:
    large = _LARGE if width * height > LARGE_PIXELS else contextlib.nullcontext()
    with large:
        pixels = np.empty((height, width, 3), np.uint8)
        decode_into(pixels, image)
        return pixels


def _refuse_size(width: int, height: int, *, rules: PrepareRules) -> None:
    short, long = sorted((width, height))
    if short < rules.min_side:
        raise ImageProblem("small", f"{width} x {height} pixels, the shorter side needs {rules.min_side}")
    if long > rules.max_aspect * short:
        raise ImageProblem("aspect", f"{width} x {height} pixels: the sides differ by more than {rules.max_aspect:g}")
    wide, high = rules.latent_size or (1, 1)
    if wide > MOST_ENLARGED * width or high > MOST_ENLARGED * height:
        raise ImageProblem("small", f"{width} x {height} pixels are too few for latents of {rules.latents}")


def _text_of(raw: Raw, *, rules: PrepareRules) -> dict[str, Any]:
    text = {name: value for name, value in raw.text.items() if not (isinstance(value, float) and math.isnan(value))}
    caption = text.get("caption", "")
    if not isinstance(caption, str):
        raise ImageProblem("bad-text", f"the caption is a {type(caption).__name__}")
    if not caption.strip() and rules.need_caption:
        raise ImageProblem("no-caption", "it has no caption")
    if rules.labels == "folders":
        text["label"] = PurePosixPath(raw.key).parent.name or None
    text["key"] = raw.key
    try:
        size = len(json.dumps(text, ensure_ascii=False, allow_nan=False).encode())
        caption_bytes = len(caption.encode())
    except (ValueError, RecursionError, TypeError) as error:
        raise ImageProblem("bad-text", str(error)) from None
    if caption_bytes > MAX_CAPTION_BYTES:
        raise ImageProblem("long-caption", f"the caption has {caption_bytes} bytes, at most {MAX_CAPTION_BYTES}")
    if size > MAX_TEXT_BYTES:
        raise ImageProblem("bad-text", f"the text has {size} bytes, at most {MAX_TEXT_BYTES}")
    return text


def _ending(image: bytes) -> str:
    """By the first bytes; the image was decoded, so it is one of the three."""
    if image[:2] == b"\xff\xd8":
        return "jpg"
    return "webp" if image[:4] == b"RIFF" else "png"
