"""One rank's part of one inner step, and how its arrays lie behind each other in one piece of memory.

The loader worker fills the arrays where they lie, be it a slot of the arena or memory of its own; the rank has views of
the same bytes. Captions and what else is told travel beside them. numpy only: loader workers import this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.data.plan import Refs
from training.data.tickets import Ticket

_ALIGN = 64


@dataclass(frozen=True)
class LocalBatch:
    """Samples of one rank for one step; b is its share of the learner's batch. Batches may differ in b, H and W.

    Of `images` and `text` the one that the model is not for has no elements, and noise has those of the images. All
    arrays are views of one piece of memory, which is used again when the last of them is gone.
    """

    position: int
    """Where the learner's whole batch begins in its order."""
    images: NDArray[np.float32]
    """[b, C, H, W] in [-1, 1]. From a loader of plain pixels: uint8 [b, H, W, C]."""
    text: NDArray[np.uint8]
    """[b, context + 1]."""
    labels: NDArray[np.int64]
    """[b]."""
    captions: list[str]
    embeddings: NDArray[np.float32]
    """[b, width] of the captions, if the dataset has them and the model needs them; else [b, 0]."""
    noise: NDArray[np.float32]
    """[b, C, H, W], standard normal. From a loader of plain pixels: no elements."""
    time: NDArray[np.float32]
    """[b] in [0, 1)."""
    drop: NDArray[np.bool_]
    """[b]; true where the condition is replaced by the null condition."""
    ids: list[int]
    """Sample numbers in the dataset's source, or rows of its index."""
    refs: Refs
    """[b]: what these samples are in the plan; one that was replaced has the sample that took its place."""
    whole: int
    """Samples of the learner's batch."""
    mark: int
    """Of the learner's batch: equal on all ranks, or they do not work on the same (`training.data.plan.Batch`)."""


@dataclass(frozen=True)
class Form:
    """Sizes of the arrays of a batch."""

    count: int
    height: int
    width: int
    channels: int
    is_text: bool = False
    """A sample is height x width x channels bytes of text."""
    is_plain: bool = False
    """Images are uint8 with channels last, and there is no noise."""
    embedding: int = 0
    """Features of a caption's embedding that was computed ahead."""

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return self._layout()[1]

    def arrays(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Views of the first `bytes` bytes of `memory`, by name."""
        return {
            name: memory[at : at + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            for name, dtype, shape, at in self._layout()[0]
        }

    def _layout(self) -> tuple[list[tuple[str, Any, tuple[int, ...], int]], int]:
        b, none = self.count, (self.count, 0, 0, 0)
        planes = none if self.is_text else (b, self.channels, self.height, self.width)
        images = (b, self.height, self.width, self.channels) if self.is_plain else planes
        text = (b, self.height * self.width * self.channels if self.is_text else 0)
        fields: list[tuple[str, Any, tuple[int, ...]]] = [
            ("images", np.uint8 if self.is_plain else np.float32, images),
            ("noise", np.float32, none if self.is_plain else planes),
            ("text", np.uint8, text),
            ("embeddings", np.float32, (b, self.embedding)),
            ("time", np.float32, (b,)),
            ("drop", np.bool_, (b,)),
            *((name, np.int64, (b,)) for name in ("labels", "ids", "source", "sample", "epoch")),
        ]
        placed, at = list[tuple[str, Any, tuple[int, ...], int]](), 0
        for name, dtype, shape in fields:
            placed.append((name, dtype, shape, at))
            at += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        return placed, at


def make_batch(arrays: Mapping[str, NDArray[Any]], *, ticket: Ticket, captions: Sequence[str]) -> LocalBatch:
    """The batch of a ticket whose arrays (of `Form.arrays`) these are."""
    names = ("images", "text", "labels", "embeddings", "noise", "time", "drop")
    return LocalBatch(
        position=ticket.position,
        captions=list(captions),
        ids=arrays["ids"].tolist(),
        refs=Refs(arrays["source"], arrays["sample"], arrays["epoch"]),
        whole=ticket.whole,
        mark=ticket.mark,
        **{name: arrays[name] for name in names},
    )


def to_unit(pixels: NDArray[np.uint8], *, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """uint8 pixels as float32 in [-1, 1], contiguous, in `out` if it is given."""
    unit = np.empty(pixels.shape, dtype=np.float32) if out is None else out
    np.divide(pixels, np.float32(127.5), out=unit, dtype=np.float32)
    np.subtract(unit, np.float32(1), out=unit)
    return unit
