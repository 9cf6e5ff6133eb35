"""One inner step as a function: loss, gradient, clipping, update, average.

Promises: the loss and the gradient are those of the whole batch, whatever the number of ranks and however the batch is
split among them; all ranks see the same numbers. A step whose loss or gradient norm is not finite changes nothing, on
any rank. One wait for the device per step, after the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spec.train import TrainConfig
from training.ema import Ema
from training.optimizer import ShardedAdamW
from training.parallel import replica_count
from training.step_batch import StepBatch


@dataclass(frozen=True)
class StepResult:
    """What the step was like, over all ranks."""

    loss: float
    """Mean over the batch."""
    gradient_norm: float
    """Before clipping."""
    applied: bool
    """False if a number was not finite: nothing was changed."""
    signals: list[float]
    """Sums of what the ranks passed."""


def train_step(
    model: nn.Module,
    *,
    optimizer: ShardedAdamW,
    ema: Ema,
    batch: StepBatch,
    config: TrainConfig,
    learning_rate: float,
    signals: Sequence[float] = (),
) -> StepResult:
    """Run one step; collective over all ranks of the learner. `signals`: more numbers that are to be added up."""
    assert isinstance(model, FSDPModule), "the gradient's scale relies on FSDP's mean over ranks"
    world = dist.get_world_size()
    losses = batch.losses(model)
    # FSDP averages over ranks; this makes it the mean over the batch even when the slices differ in size.
    (losses.sum() * (world / config.batch)).backward()
    squares = optimizer.gradient_norm().double().square() / replica_count(model)
    known = torch.tensor([float(losses.numel()), *signals], dtype=torch.float64)
    sums = torch.cat([torch.stack([losses.detach().double().sum(), squares]), known.to(squares.device)])
    dist.all_reduce(sums)
    total, squared, samples, *summed = sums.tolist()
    assert samples == config.batch, f"the ranks' slices add up to {samples:.0f} samples, not {config.batch}"
    loss, norm = total / samples, math.sqrt(squared) if squared >= 0 else math.nan
    applied = math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(learning_rate=learning_rate, gradient_norm=norm, gradient_clip=config.gradient_clip)
        ema.update()
    optimizer.zero_grad()
    return StepResult(loss=loss, gradient_norm=norm, applied=applied, signals=summed)
