"""One inner step as a function: loss, gradient, clipping, update, average.

Promises: the loss and the gradient are those of the whole batch, whatever the number of ranks and however the batch is
split among them; all ranks see the same numbers. A step whose loss or gradient norm is not finite changes nothing, on
any rank. One wait for the device per step, after the backward pass. Ranks whose batches are not parts of one and the
same are told apart before they change anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spec.errors import DataError
from spec.train import TrainConfig
from training.collectives import all_gather_json
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
    samples: int,
    mark: int = 0,
    signals: Sequence[float] = (),
) -> StepResult:
    """Run one step; collective over all ranks of the learner. `signals`: more numbers that are to be added up.

    `samples` and `mark`: of the whole batch that the ranks' batches are parts of, see `training.data.batch.LocalBatch`.
    """
    assert isinstance(model, FSDPModule), "the gradient's scale relies on FSDP's mean over ranks"
    world = dist.get_world_size()
    losses = batch.losses(model)
    # FSDP averages over ranks; this makes it the mean over the batch even when the slices differ in size.
    (losses.sum() * (world / samples)).backward()
    squares = optimizer.gradient_norm().double().square() / replica_count(model)
    known = torch.tensor([float(losses.numel()), float(mark), *signals], dtype=torch.float64)
    sums = torch.cat([torch.stack([losses.detach().double().sum(), squares]), known.to(squares.device)])
    dist.all_reduce(sums)
    total, squared, found, marks, *summed = sums.tolist()
    if marks != world * mark:
        raise _apart(mark)
    assert found == samples, f"the ranks' slices add up to {found:.0f} samples, not {samples}"
    loss, norm = total / samples, math.sqrt(squared) if squared >= 0 else math.nan
    applied = math.isfinite(loss) and math.isfinite(norm)
    if applied:
        optimizer.step(learning_rate=learning_rate, gradient_norm=norm, gradient_clip=config.gradient_clip)
        ema.update()
    optimizer.zero_grad()
    return StepResult(loss=loss, gradient_norm=norm, applied=applied, signals=summed)


def _apart(mark: int) -> DataError:
    """Every rank sees that the sum is not what it should be, and says what it has."""
    marks = all_gather_json(mark)
    usual = Counter(marks).most_common(1)[0][0]
    odd = ", ".join(str(rank) for rank, one in enumerate(marks) if one != usual)
    return DataError(
        f"of {len(marks)} ranks, those with the numbers {odd} worked on another batch than the others",
        hint="the copies of the dataset on their nodes, or their code, are other ones: empty the datasets' cache there",
    )
