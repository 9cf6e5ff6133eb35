"""One rank's slice of a batch on the model's device, with the objective of its family: all that a step knows of either.

`to_device` makes it of what the loader delivers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data.batch import LocalBatch
from training.models import flow, lm


class StepBatch(Protocol):
    """B samples."""

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of its images; none of text."""
        ...

    def losses(self, model: Callable[..., Any]) -> Tensor:
        """[B] float32: what training makes smaller."""
        ...


@dataclass(frozen=True)
class ImageBatch:
    """Images for the flow that a diffusion transformer learns."""

    images: Tensor
    """[B, C, S, S] float32 in [-1, 1]."""
    noise: Tensor
    """Like the images, standard normal."""
    time: Tensor
    """[B] float32 in [0, 1]."""
    condition: Tensor
    """[B, text_width] float32, or labels [B] int64."""
    drop: Tensor
    """[B] bool, true where the condition is withheld."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.images.shape[2], self.images.shape[3]

    def losses(self, model: Callable[..., Any]) -> Tensor:
        """Mean squared error of the velocity per sample."""
        return flow.loss(
            model, images=self.images, noise=self.noise, time=self.time, condition=self.condition, drop=self.drop
        )


@dataclass(frozen=True)
class TextBatch:
    """Text for a language model."""

    text: Tensor
    """[B, context + 1] int64 in 0..255."""
    size: None = None

    def losses(self, model: Callable[..., Any]) -> Tensor:
        """Mean cross entropy per byte of each sample, in nats."""
        return lm.loss(model, text=self.text)


def to_device(local: LocalBatch, *, embeddings: NDArray[Any] | None, device: torch.device) -> StepBatch:
    """The batch of the model's family; `embeddings` of its captions, where the model needs them."""

    def move(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    if local.text.size:
        return TextBatch(move(local.text).long())
    return ImageBatch(
        images=move(local.images),
        noise=move(local.noise),
        time=move(local.time),
        condition=move(local.labels if embeddings is None else embeddings),
        drop=move(local.drop),
    )
