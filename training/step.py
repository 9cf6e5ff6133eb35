"""One inner step as a function: loss, gradient, clipping, update, average.

Promises: the loss and the gradient are those of the whole batch, whatever the number of ranks and however the batch is
split among them; all ranks see the same numbers. A step whose loss or gradient norm is not finite changes nothing, on
any rank. One wait for the device per step, after the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from spec.train import TrainConfig
from training.ema import Ema
from training.models import flow
from training.models.dit import DiT
from training.optimizer import ShardedAdamW
from training.parallel import replica_count


@dataclass(frozen=True)
class StepBatch:
    """This rank's slice of one batch, on the model's device. B is the slice's size."""

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


@dataclass(frozen=True)
class StepResult:
    """What the step was like, over all ranks."""

    loss: float
    """Mean over the batch."""
    gradient_norm: float
    """Before clipping."""
    applied: bool
    """False if a number was not finite: nothing was changed."""


def train_step(
    model: DiT, *, optimizer: ShardedAdamW, ema: Ema, batch: StepBatch, config: TrainConfig, learning_rate: float
) -> StepResult:
    """Run one step; collective over all ranks of the learner."""
    assert isinstance(model, FSDPModule), "the gradient's scale relies on FSDP's mean over ranks"
    world = dist.get_world_size()
    losses = flow.loss(
        model, images=batch.images, noise=batch.noise, time=batch.time, condition=batch.condition, drop=batch.drop
    )  # fmt: skip
    # FSDP averages over ranks; this makes it the mean over the batch even when the slices differ in size.
    (losses.sum() * (world / config.batch)).backward()
    squares = optimizer.gradient_norm().double().square() / replica_count(model)
    sums = torch.stack([losses.detach().double().sum(), squares, torch.full_like(squares, float(losses.numel()))])
    dist.all_reduce(sums)
    total, squared, samples = (float(value) for value in sums.tolist())
    assert samples == config.batch, f"the ranks' slices add up to {samples:.0f} samples, not {config.batch}"
    loss, norm = total / samples, math.sqrt(squared) if squared >= 0 else math.nan
    applied = math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(learning_rate=learning_rate, gradient_norm=norm, gradient_clip=config.gradient_clip)
        ema.update()
    optimizer.zero_grad()
    return StepResult(loss=loss, gradient_norm=norm, applied=applied)
