"""Loss of the shared weights on held-out samples, with noise and times that never change: the merged model's curve.

All ranks take part, each with its slice; learners with equal weights report equal values up to rounding.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from spec.plan import Plan
from training.conditions import Conditions
from training.context import RuntimeContext
from training.data.held_out import held_out
from training.models import flow
from training.models.dit import Velocity

SAMPLES = 256


class Validation:
    """The fixed batch of this rank."""

    def __init__(
        self, plan: Plan, *, context: RuntimeContext, conditions: Conditions | None, device: torch.device
    ) -> None:
        assert plan.train is not None
        count = max(1, SAMPLES // context.world_size) * context.world_size
        real = held_out(plan.learner(context.learner).data_manifest, count=count)
        count = len(real.labels) // context.world_size * context.world_size
        size = count // context.world_size
        own = slice(context.rank * size, (context.rank + 1) * size)
        random = np.random.Generator(np.random.Philox(key=plan.train.seed))
        noise = random.standard_normal(real.images[:count].shape, dtype=np.float32)
        time = (random.permutation(count).astype(np.float32) + 0.5) / count
        if conditions is not None:
            condition = torch.from_numpy(conditions.get(real.captions[own]))
        else:
            condition = torch.from_numpy(np.asarray(real.labels[own], dtype=np.int64))
        self._batch = {
            "images": torch.from_numpy(np.ascontiguousarray(real.images[own])).to(device),
            "noise": torch.from_numpy(noise[own]).to(device),
            "time": torch.from_numpy(time[own]).to(device),
            "condition": condition.to(device),
            "drop": torch.zeros(size, dtype=torch.bool, device=device),
        }
        self._count = count

    @torch.no_grad()
    def loss(self, model: FSDPModule) -> float:
        """Mean velocity error per pixel over all ranks' slices."""
        total = flow.loss(cast("Velocity", model), **self._batch).double().sum()
        # Without a backward pass FSDP leaves the root's own parameters gathered; whoever looks at this rank's shards
        # next must find shards.
        model.reshard()
        dist.all_reduce(total)
        return float(total) / self._count
