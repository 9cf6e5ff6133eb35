"""A small classifier of the dataset's own labels, and the feature space of the Frechet distance.

It is trained on the real training split only, from a fixed seed on one thread, in seconds; the same split gives the
same weights on the same machine. It is a yardstick, not a product: what counts is that its own accuracy on held-out
real images is reported beside every score.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.adamw import adamw

FEATURES = 32
"""Width of the feature layer. Few enough that a covariance of some hundred samples has full rank."""
REVISION = 2
"""Part of the cache's file name; raise it with every change of architecture or training."""
_LARGEST_SIDE = 16  # larger images are averaged down: a yardstick needs no fine detail
_EPOCHS = 25
_BATCH = 64
_LEARNING_RATE = 2e-2
_WARMUP_SHARE = 0.2
_WEIGHT_DECAY = 0.05
_DROPOUT = 0.2
_SEED = 20_240_229
_INFERENCE_BATCH = 64
"""Images of one forward pass, always: the last one is padded, so that an image's features are the same bits whatever is
scored beside it."""


class Classifier(nn.Module):
    """uint8 images [b, height, width, channels] to logits [b, labels]; any image size from 4 pixels."""

    def __init__(self, *, channels: int, labels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.feature = nn.Linear(32 * 16, FEATURES)
        self.head = nn.Linear(FEATURES, labels)

    def features(self, images: Tensor) -> Tensor:
        """[b, FEATURES] float32 in (-1, 1): what the last layer sees."""
        x = images.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0
        while min(x.shape[-2:]) > _LARGEST_SIDE:
            x = F.avg_pool2d(x, 2)
        x = F.relu(self.second(F.relu(self.first(x))))
        x = F.dropout(self.pool(x).flatten(1), _DROPOUT, self.training)
        return torch.tanh(self.feature(x))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, labels]."""
        return cast("Tensor", self.head(F.dropout(self.features(images), _DROPOUT, self.training)))


def train_classifier(pixels: NDArray[np.uint8], *, labels: NDArray[np.int64], num_labels: int) -> Classifier:
    """Train on [images, height, width, channels]; deterministic; leaves torch's own random state and threads alone."""
    with _own_torch_state(_SEED):
        model = Classifier(channels=pixels.shape[3], labels=num_labels).train()
        images, targets = torch.from_numpy(pixels.copy()), torch.from_numpy(labels.copy())
        steps, optimizer = _EPOCHS * -(-len(targets) // _BATCH), _AdamW(list(model.parameters()))
        done = 0
        for _ in range(_EPOCHS):
            for index in torch.randperm(len(targets)).split(_BATCH):
                loss = F.cross_entropy(model(_shifted(images[index])), targets[index], label_smoothing=0.05)
                loss.backward()
                optimizer.step(_learning_rate(done / steps))
                done += 1
    return model.eval().requires_grad_(requires_grad=False)


def read_out(model: Classifier, pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features [images, FEATURES] and predicted labels [images]."""
    features: list[NDArray[np.float32]] = []
    predicted: list[NDArray[np.int64]] = []
    with torch.inference_mode():
        for start in range(0, len(pixels), _INFERENCE_BATCH):
            some = pixels[start : start + _INFERENCE_BATCH]
            padded = np.zeros((_INFERENCE_BATCH, *pixels.shape[1:]), dtype=np.uint8)
            padded[: len(some)] = some
            part = model.features(torch.from_numpy(padded))
            features.append(part.numpy()[: len(some)])
            predicted.append(model.head(part).argmax(dim=1).numpy()[: len(some)])
    return np.concatenate(features), np.concatenate(predicted)


def accuracy(predicted: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """Share of predictions that are right."""
    return float((predicted == labels).mean())


class _AdamW:
    """AdamW from torch's functional form: the class in torch.optim imports the compiler, which takes seconds."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._first = [torch.zeros_like(one) for one in parameters]
        self._second = [torch.zeros_like(one) for one in parameters]
        self._steps = [torch.zeros(()) for _ in parameters]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update with the gradients that are there, then drop them."""
        gradients = [cast("Tensor", one.grad) for one in self._parameters]
        adamw(
            [one.data for one in self._parameters],
            gradients,
            self._first,
            self._second,
            [],
            self._steps,
            foreach=True,
            amsgrad=False,
            maximize=False,
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            lr=learning_rate,
            weight_decay=_WEIGHT_DECAY,
        )
        for one in self._parameters:
            one.grad = None


def _learning_rate(share: float) -> float:
    """Linear rise, then half a cosine, over the share of training that is done."""
    if share < _WARMUP_SHARE:
        return _LEARNING_RATE * (0.05 + 0.95 * share / _WARMUP_SHARE)
    return _LEARNING_RATE * 0.5 * (1.0 + math.cos(math.pi * (share - _WARMUP_SHARE) / (1.0 - _WARMUP_SHARE)))


def _shifted(images: Tensor) -> Tensor:
    """The batch moved by at most one pixel, edges padded with black: scans are not centred to the pixel."""
    down, right = (int(one) for one in torch.randint(-1, 2, (2,)))
    height, width = images.shape[1:3]
    padded = F.pad(images, (0, 0, 1, 1, 1, 1))
    return padded[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]


@contextmanager
def _own_torch_state(seed: int) -> Generator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
