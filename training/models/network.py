"""What the networks are built of, and how every network begins.

Promises: the same seed gives the same initial weights on any device and any number of ranks, because every parameter is
drawn alone, on the CPU, from a generator keyed by (seed, name).

Shape letters: B batch, T tokens, W width, H heads, D features of a head.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NORM_EPSILON = 1e-6
_LONGEST_PERIOD = 10_000.0


def sinusoids(positions: Tensor, *, features: int) -> Tensor:
    """[N] positions -> [N, features] float32; cosines first."""
    half = (features + 1) // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) / half
    angles = positions.float()[:, None] * torch.exp(-math.log(_LONGEST_PERIOD) * exponents)[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)[:, :features]


class Mlp(nn.Module):
    """Two linear layers with a smooth nonlinearity between."""

    def __init__(self, *, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self.down(F.gelu(self.up(features), approximate="tanh"))


class Attention(nn.Module):
    """Self-attention over all tokens; queries and keys are normalised, which keeps bfloat16 logits bounded."""

    def __init__(self, *, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        """No token sees those behind it."""
        self.qkv = nn.Linear(width, 3 * width)
        self.query_norm = nn.RMSNorm(width // heads, eps=NORM_EPSILON)
        self.key_norm = nn.RMSNorm(width // heads, eps=NORM_EPSILON)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, W]."""
        query, key, value = (
            self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )  # [B, H, T, D]
        mixed = F.scaled_dot_product_attention(self.query_norm(query), self.key_norm(key), value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class RecomputedBlock(nn.Module, ABC):
    """One transformer block; the unit of sharding, recomputation and compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.recompute = False
        """Keep only the inputs and compute the rest again in the backward pass."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """tokens [B, T, W], and what the family adds -> [B, T, W]."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, *inputs, use_reentrant=False)
        return self.compute(*inputs)

    @abstractmethod
    def compute(self, *inputs: Tensor) -> Tensor:
        """The block itself."""


class Network(nn.Module, ABC):
    """A network of a family. Made with torch's default weights; call `initialise`, or load weights, before use."""

    blocks: nn.ModuleList
    """Of `RecomputedBlock`."""
    starts_at_zero: ClassVar[tuple[str, ...]]
    """Ends of the names of parameters that are zero at first."""
    deviations: ClassVar[dict[str, float]] = {}
    """Parameters that are drawn from a normal distribution, and its deviation."""

    @abstractmethod
    def reset_buffers(self) -> None:
        """Compute what is fixed anew on the device of the weights (needed after leaving the meta device)."""

    @classmethod
    def initial_tensor(cls, name: str, *, shape: tuple[int, ...], seed: int) -> Tensor:
        """The whole initial value of one parameter, on the CPU in float32, by (seed, name, shape) alone."""
        if name.endswith(cls.starts_at_zero):
            return torch.zeros(shape)
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if name in cls.deviations:
            return torch.empty(shape).normal_(0.0, cls.deviations[name], generator=generator)
        bound = math.sqrt(6.0 / (shape[0] + shape[1]))  # Glorot: keeps the variance of activations and of gradients
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)


AnyNetwork = TypeVar("AnyNetwork", bound=Network)


def initial_tensors(model: Network, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter's name and whole initial value, one at a time: a large model never lies in memory twice."""
    for name, parameter in model.named_parameters():
        yield name, model.initial_tensor(name, shape=tuple(parameter.shape), seed=seed)


def initialise(model: AnyNetwork, *, seed: int) -> AnyNetwork:
    """Set the initial weights of a model that is not sharded."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_tensors(model, seed=seed):
            parameters[name].copy_(value)
    return model
