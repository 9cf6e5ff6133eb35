"""Check M1: two optimizer steps of the real model on real samples, alone in one process.

No process group, no services: text conditions are random vectors of the right width. Both steps see the same batch,
noise and times, so the losses are comparable. Master weights stay float32 and the forward pass computes in the
configured dtype, as the sharded trainer does.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.optim.adamw import adamw

from spec.errors import ConfigError, DataError
from spec.shards import open_manifest
from spec.train import ModelConfig, TrainConfig
from storage.datasets import held_shards, local_manifest
from storage.encoded import fill_usable
from training.data.batch import to_unit
from training.data.contents import open_contents
from training.data.work import check_shape, files_of
from training.models.families import make_network
from training.models.network import initialise
from training.step_batch import ImageBatch, StepBatch, TextBatch

MAX_BATCH = 16
"""Samples of a step: enough to run every kernel, few enough to fit where the whole batch is spread over ranks."""


def two_steps(train: TrainConfig, *, manifest_uri: str) -> tuple[float, float]:
    """Mean losses of two steps of AdamW at the peak learning rate."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = _batch(train, uri=manifest_uri, device=device)
    model = initialise(make_network(train.model), seed=train.seed).to(device).train()
    masters = dict(model.named_parameters())
    dtype = torch.bfloat16 if train.dtype == "bfloat16" else torch.float32
    moments = [[torch.zeros_like(one) for one in masters.values()] for _ in range(2)]
    counts = [torch.zeros((), device=device) for _ in masters]
    losses: list[float] = []
    for _ in range(2):
        weights = {name: one.to(dtype) for name, one in masters.items()}

        def forward(*inputs: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
            return cast("Tensor", functional_call(model, weights, inputs))

        loss = batch.losses(forward).mean()
        gradients = torch.autograd.grad(loss, list(masters.values()), allow_unused=True, materialize_grads=True)
        losses.append(loss.item())
        with torch.no_grad():
            # The functional form of the trainer's optimizer; its class would import torch's compiler, for seconds.
            adamw(
                [one.data for one in masters.values()],
                list(gradients),
                moments[0],
                moments[1],
                [],
                counts,
                foreach=True,
                amsgrad=False,
                maximize=False,
                beta1=train.betas[0],
                beta2=train.betas[1],
                eps=1e-8,
                lr=train.learning_rate,
                weight_decay=train.weight_decay,
            )
    return losses[0], losses[1]


def _batch(train: TrainConfig, *, uri: str, device: torch.device) -> StepBatch:
    """A batch like the trainer's, from the first shard of the training split."""
    local = local_manifest(uri, splits=())
    config, manifest = train.model, open_manifest(local)
    check_shape(manifest, model=config, where=uri)
    if not manifest.splits.train:
        raise DataError("the manifest names no training shard", where=uri, hint="prepare the dataset again")
    files = files_of(manifest, uri=uri, local=local, split="train")
    pixels = np.empty((min(train.batch, MAX_BATCH), *config.sample_shape), dtype=np.uint8)
    first = manifest.splits.train[:1]
    with held_shards(uri, shards=first, local=local), closing(open_contents(files)) as contents:
        known = fill_usable(pixels, samples=range(manifest.splits.train[0].samples), fill=contents.fill)
    if not known:
        raise DataError("no sample of the first shard can be used", where=uri, hint="prepare the dataset again")
    rows = np.arange(len(pixels)) % len(known)
    if not isinstance(config, ModelConfig):
        return TextBatch(torch.from_numpy(pixels[rows].reshape(len(rows), -1)).long().to(device))
    images = to_unit(pixels[rows].transpose(0, 3, 1, 2))
    random = np.random.Generator(np.random.Philox(key=[train.seed, 0]))
    arrays: dict[str, NDArray[Any]] = {
        "images": images,
        "noise": random.standard_normal(images.shape, dtype=np.float32),
        "time": random.random(len(rows), dtype=np.float32),
        "condition": _condition([known[row].label for row in rows], config=config, random=random),
        "drop": random.random(len(rows)) < config.condition_dropout,
    }
    return ImageBatch(**{name: torch.from_numpy(value).to(device) for name, value in arrays.items()})


def _condition(labels: list[int], *, config: ModelConfig, random: np.random.Generator) -> NDArray[Any]:
    if config.conditioning == "text":
        return random.standard_normal((len(labels), config.text_width), dtype=np.float32)
    wrong = next((label for label in labels if label >= config.num_classes), None)
    if wrong is not None:
        raise ConfigError(
            f"the dataset has label {wrong}, the model knows {config.num_classes}", hint="raise train.model.num_classes"
        )
    return np.array(labels, dtype=np.int64)
