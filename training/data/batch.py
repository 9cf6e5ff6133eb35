"""One rank's part of one inner step, and its form on the pipe between loader worker and rank.

The body on the pipe is the arrays' own bytes in a fixed order followed by the captions; its size is known before it
is read, so the rank reads into memory it allocated itself and the arrays are views of that. numpy only: loader
workers import this module.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.shard_bytes import Shape


@dataclass(frozen=True)
class LocalBatch:
    """Samples of one rank for one step; b is the batch of the learner over its world size.

    Of `images` and `text` the one that the model is not for has no elements, and noise has those of the images.
    """

    position: int
    """Where the learner's whole batch begins in its order."""
    images: NDArray[np.float32]
    """[b, C, H, W] in [-1, 1]."""
    text: NDArray[np.uint8]
    """[b, context + 1]."""
    labels: NDArray[np.int64]
    """[b]."""
    captions: list[str]
    noise: NDArray[np.float32]
    """[b, C, H, W], standard normal."""
    time: NDArray[np.float32]
    """[b] in [0, 1)."""
    drop: NDArray[np.bool_]
    """[b]; true where the condition is replaced by the null condition."""
    ids: list[int]
    """Sample numbers in the dataset's source."""


def shapes_of(count: int, *, shape: Shape, is_text: bool) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    """Shapes of the images and of the text in a batch of `count` samples."""
    if is_text:
        return (count, 0, 0, 0), (count, shape.pixels)
    return (count, shape.channels, shape.height, shape.width), (count, 0)


def to_unit(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 pixels as float32 in [-1, 1], contiguous."""
    return np.ascontiguousarray(pixels, dtype=np.float32) / np.float32(127.5) - np.float32(1)


def to_bytes(batch: LocalBatch) -> list[bytes | memoryview]:
    """The parts of the body, in order, without copying the images."""
    captions = [caption.encode() for caption in batch.captions]
    lengths = struct.pack(f"<{len(captions)}I", *map(len, captions))
    arrays: tuple[NDArray[Any], ...] = (
        batch.images,
        batch.text,
        batch.noise,
        batch.time,
        batch.labels,
        np.array(batch.ids, dtype=np.int64),
        batch.drop,
    )
    return [*(np.ascontiguousarray(array).data.cast("B") for array in arrays if array.size), lengths, *captions]


def from_bytes(body: bytearray, *, position: int, count: int, shape: Shape, is_text: bool) -> LocalBatch:
    """The batch whose body this is; its arrays are writable views of `body`."""
    image, text = shapes_of(count, shape=shape, is_text=is_text)
    reader = _Reader(body)
    images, text = reader.take(np.float32, image), reader.take(np.uint8, text)
    noise = reader.take(np.float32, image)
    time, labels = reader.take(np.float32, (count,)), reader.take(np.int64, (count,))
    ids, drop = reader.take(np.int64, (count,)), reader.take(np.bool_, (count,))
    captions = [reader.text(int(length)) for length in reader.take(np.uint32, (count,))]
    return LocalBatch(
        position=position, images=images, text=text, labels=labels, captions=captions, noise=noise, time=time,
        drop=drop, ids=ids.tolist(),
    )  # fmt: skip


class _Reader:
    def __init__(self, body: bytearray) -> None:
        self._body = memoryview(body)
        self._at = 0

    def take(self, dtype: type[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        size = math.prod(shape)
        array = np.frombuffer(self._body, dtype=dtype, count=size, offset=self._at).reshape(shape)
        self._at += array.nbytes
        return array

    def text(self, length: int) -> str:
        self._at += length
        return str(self._body[self._at - length : self._at], "utf-8")
