"""The toy task of cross-region.md, appendix A: noisy points around 32 centres in 64 dimensions, four classes, a network
with one hidden layer, endless fresh data. Small enough for many runs, hard enough that a bad outer optimizer shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from training.sync.layout import Floats

INPUTS, HIDDEN, CLASSES, CENTRES = 64, 128, 4, 32
NOISE, BATCH, LEARNERS = 0.35, 32, 4
EVALUATED = 4096
SHAPES = ((INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))

Labels = npt.NDArray[np.int64]


class Task:
    """Data and loss; everything follows from seeds."""

    def __init__(self) -> None:
        centres = np.random.default_rng(0).standard_normal((CENTRES, INPUTS))
        self._centres = (centres / np.linalg.norm(centres, axis=1, keepdims=True)).astype(np.float32)
        self._held_out = self.batch(np.random.default_rng(999), EVALUATED)

    def batch(self, random: np.random.Generator, size: int) -> tuple[Floats, Labels]:
        """Points and their classes."""
        chosen = random.integers(0, CENTRES, size)
        noise = random.standard_normal((size, INPUTS), dtype=np.float32)
        return self._centres[chosen] + np.float32(NOISE) * noise, chosen % CLASSES

    def loss(self, theta: Floats) -> float:
        """Mean cross entropy of the held-out points."""
        points, labels = self._held_out
        return self._forward(theta, points, labels)[0]

    def gradient(self, theta: Floats, points: Floats, labels: Labels) -> Floats:
        """Of the mean cross entropy of a batch."""
        _, parts, hidden, chances = self._forward(theta, points, labels)
        chances[np.arange(len(labels)), labels] -= 1
        chances /= len(labels)
        back = chances @ parts[2].T
        back[hidden <= 0] = 0
        pieces = (points.T @ back, back.sum(0), hidden.T @ chances, chances.sum(0))
        return np.concatenate([piece.ravel() for piece in pieces])

    def _forward(self, theta: Floats, points: Floats, labels: Labels) -> tuple[float, list[Floats], Floats, Floats]:
        parts = _split(theta)
        hidden = np.maximum(points @ parts[0] + parts[1], 0)
        logits = hidden @ parts[2] + parts[3]
        chances = np.exp(logits - logits.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        picked = chances[np.arange(len(labels)), labels]
        return float(-np.log(picked + 1e-12).mean()), parts, hidden, chances


class AdamW:
    """The inner optimizer: learning rate 0.02, cosine to 5 %."""

    def __init__(self, size: int) -> None:
        self._mean, self._square = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._steps = 0

    def update(self, theta: Floats, gradient: Floats, progress: float) -> Floats:
        """The next weights."""
        self._steps += 1
        self._mean += np.float32(0.1) * (gradient - self._mean)
        self._square += np.float32(0.01) * (gradient * gradient - self._square)
        rate = 2e-2 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1))))
        mean = self._mean / (1 - 0.9**self._steps)
        root = np.sqrt(self._square / (1 - 0.99**self._steps)) + 1e-8
        return (theta - rate * (1e-3 * theta + mean / root)).astype(np.float32)


class ToyInner:
    """One learner's training; the union of several learners' batches makes it the data-parallel run."""

    def __init__(self, task: Task, *, seed: int, learners: Sequence[int]) -> None:
        self._task, self._optimizer = task, AdamW(len(initial_weights()))
        self._random = [np.random.default_rng(seed * 100 + learner) for learner in learners]

    def step(self, theta: Floats, progress: float) -> Floats:
        gradients = [self._task.gradient(theta, *self._task.batch(random, BATCH)) for random in self._random]
        return self._optimizer.update(theta, np.mean(gradients, axis=0), progress)


def make_inners(task: Task, *, seed: int, learners: int = LEARNERS) -> list[ToyInner]:
    """Learners with data of their own."""
    return [ToyInner(task, seed=seed, learners=[number]) for number in range(learners)]


def train_together(task: Task, *, seed: int, steps: int, learners: int = LEARNERS) -> Floats:
    """The data-parallel run on the same data: gradients averaged in every step."""
    theta, inner = initial_weights(), ToyInner(task, seed=seed, learners=range(learners))
    for step in range(steps):
        theta = inner.step(theta, step / steps)
    return theta


def initial_weights() -> Floats:
    """The same for everybody."""
    random = np.random.default_rng(1)
    first = random.standard_normal((INPUTS, HIDDEN)) / math.sqrt(INPUTS)
    second = random.standard_normal((HIDDEN, CLASSES)) / math.sqrt(HIDDEN)
    parts = (first.ravel(), np.zeros(HIDDEN), second.ravel(), np.zeros(CLASSES))
    return np.concatenate(parts).astype(np.float32)


def _split(theta: Floats) -> list[Floats]:
    parts: list[Floats] = []
    start = 0
    for shape in SHAPES:
        size = math.prod(shape)
        parts.append(theta[start : start + size].reshape(shape))
        start += size
    return parts
