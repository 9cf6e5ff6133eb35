"""Loss of the shared weights on held-out samples, with noise and times that never change: the merged model's curve.

All ranks take part, each with its slice; learners with equal weights report equal values up to rounding.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spec.plan import Plan
from spec.train import TrainConfig
from training.conditions import Conditions
from training.context import RuntimeContext
from training.data.held_out import held_out, held_out_text
from training.step_batch import ImageBatch, StepBatch, TextBatch

SAMPLES = 256


class Validation:
    """The fixed batch of this rank."""

    def __init__(
        self, plan: Plan, *, context: RuntimeContext, conditions: Conditions | None, device: torch.device
    ) -> None:
        assert plan.train is not None
        data, size = plan.learner(context.learner).data_manifest, max(1, SAMPLES // context.world_size)
        own = slice(context.rank * size, (context.rank + 1) * size)
        self._count = size * context.world_size
        self._batch = held_out_batch(
            data, count=self._count, own=own, train=plan.train, conditions=conditions, device=device
        )

    @torch.no_grad()
    def loss(self, model: FSDPModule) -> float:
        """Mean loss over all ranks' slices: velocity error per pixel, or nats per byte."""
        total = self._batch.losses(cast("nn.Module", model)).double().sum()
        # Without a backward pass FSDP leaves the root's own parameters gathered; whoever looks at this rank's shards
        # next must find shards.
        model.reshard()
        dist.all_reduce(total)
        return float(total) / self._count


def held_out_batch(
    manifest: str, *, count: int, own: slice, train: TrainConfig, conditions: Conditions | None, device: torch.device
) -> StepBatch:
    """The part `own` of the first `count` held-out samples.

    Noise and times are drawn for all of them, by the seed alone, so that a part is the same whatever the world's size.
    """
    if train.model.kind == "lm":
        return TextBatch(torch.from_numpy(held_out_text(manifest, count=count)[own].astype(np.int64)).to(device))
    real = held_out(manifest, count=count, shape=train.model.sample_shape)
    random = np.random.Generator(np.random.Philox(key=train.seed))
    noise = random.standard_normal(real.images.shape, dtype=np.float32)
    time = (random.permutation(count).astype(np.float32) + 0.5) / count
    condition = real.labels[own] if conditions is None else conditions.get(real.captions[own])
    arrays = {"images": real.images[own], "noise": noise[own], "time": time[own], "condition": condition}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in arrays.items()}
    return ImageBatch(**tensors, drop=torch.zeros(len(time[own]), dtype=torch.bool, device=device))
