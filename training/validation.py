"""Loss of the shared weights on held-out samples, with noise and times that never change: the merged model's curve.

All ranks take part, each with its slice; learners with equal weights report equal values up to rounding.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule

from spec.buckets import Bucket
from spec.errors import DataError
from spec.plan import Plan
from spec.train import TrainConfig
from storage.datasets import read_manifest
from training.conditions import Conditions
from training.context import RuntimeContext
from training.data.held_out import held_out, held_out_by_size, held_out_text
from training.step_batch import ImageBatch, StepBatch, TextBatch

SAMPLES = 256


class Validation:
    """The fixed samples of this rank: one batch, or one for each size of image."""

    def __init__(
        self,
        plan: Plan,
        *,
        context: RuntimeContext,
        joined: NDArray[np.integer],
        conditions: Conditions | None,
        device: torch.device,
    ) -> None:
        """`joined`: which bucket each bucket's samples go to, as the loader has it; a plan without buckets has one."""
        assert plan.train is not None
        data = plan.learner(context.learner).data_manifest
        manifest = read_manifest(data)
        size = min(SAMPLES, manifest.count("test")) // context.world_size
        if not size:
            raise DataError(
                f"the learner has {context.world_size} ranks, the dataset fewer held-out samples to judge the model by",
                where=data,
                hint="prepare the dataset with a larger --held-out",
            )
        self._count = size * context.world_size
        if plan.buckets or manifest.format == "tar":  # what cannot be used is left out, so ranks may have unequal parts
            self._parts, self._count = _parts_by_size(
                plan, count=self._count, context=context, joined=joined, conditions=conditions, device=device
            )
            return
        own = slice(context.rank * size, (context.rank + 1) * size)
        batch = held_out_batch(data, count=self._count, own=own, train=plan.train, conditions=conditions, device=device)
        self._parts = [(batch, True)]

    @torch.no_grad()
    def loss(self, model: FSDPModule) -> float:
        """Mean loss over all ranks' slices: velocity error per pixel, or nats per byte."""
        total = torch.zeros((), dtype=torch.float64)
        for batch, counts in self._parts:
            losses = batch.losses(cast("nn.Module", model)).double().sum()
            total = total.to(losses.device) + (losses if counts else 0)
        # Without a backward pass FSDP leaves the root's own parameters gathered; whoever looks at this rank's shards
        # next must find shards.
        model.reshard()
        dist.all_reduce(total)
        return float(total) / self._count


def _parts_by_size(
    plan: Plan,
    *,
    count: int,
    context: RuntimeContext,
    joined: NDArray[np.integer],
    conditions: Conditions | None,
    device: torch.device,
) -> tuple[list[tuple[StepBatch, bool]], int]:
    """A batch for each size, and whether it counts; and the samples of all ranks. A rank that has no sample of a size
    runs one all the same.

    A sample's noise is drawn by the seed and its place, so it is the same whatever the world's size.
    """
    assert plan.train is not None
    train, data = plan.train, plan.learner(context.learner).data_manifest
    height, width, channels = train.model.sample_shape
    buckets = plan.buckets or [Bucket(width, height, train.batch)]
    groups = held_out_by_size(data, count=count, buckets=buckets, joined=joined, channels=channels)
    times = np.random.Generator(np.random.Philox(key=train.seed)).permutation(count)
    parts: list[tuple[StepBatch, bool]] = []
    for places, real in groups:
        own = np.array_split(np.arange(len(places)), context.world_size)[context.rank]
        rows = own if len(own) else np.arange(1)
        noise = [
            np.random.Generator(np.random.Philox(key=[train.seed, place])).standard_normal(
                real.images.shape[1:], dtype=np.float32
            )
            for place in places[rows].tolist()
        ]
        captions = [real.captions[row] for row in rows.tolist()]
        batch = _batch(
            images=real.images[rows],
            noise=np.stack(noise),
            time=(times[places[rows]].astype(np.float32) + 0.5) / count,
            condition=real.labels[rows] if conditions is None else conditions.get(captions),
            device=device,
        )
        parts.append((batch, len(own) > 0))
    return parts, sum(len(places) for places, _ in groups)


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
    return _batch(images=real.images[own], noise=noise[own], time=time[own], condition=condition, device=device)


def _batch(*, device: torch.device, **arrays: NDArray[Any]) -> ImageBatch:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in arrays.items()}
    return ImageBatch(**tensors, drop=torch.zeros(len(arrays["time"]), dtype=torch.bool, device=device))
