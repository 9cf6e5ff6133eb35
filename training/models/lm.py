"""A decoder-only transformer over bytes: the logits of each next byte from the bytes up to it, and the objective.

Promises: no byte's logits depend on a byte behind it. The forward pass never waits for the device and computes in the
dtype its weights have; logits come back in float32. At first all bytes are equally likely: the loss starts at ln 256.

Bytes need no vocabulary file. Queries and keys are normalised and positions are fixed sinusoids, as in the image model.

Shape letters: B batch, T bytes, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec.train import LanguageModelConfig
from training.models.network import NORM_EPSILON, Attention, Mlp, Network, RecomputedBlock, sinusoids

BYTES = 256


class TextBlock(RecomputedBlock):
    """One transformer block: normalise, then attend; normalise, then feed forward."""

    def __init__(self, *, config: LanguageModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.attention = Attention(width=config.width, heads=config.heads, causal=True)
        self.mlp_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.mlp = Mlp(inputs=config.width, hidden=int(config.width * config.mlp_ratio), outputs=config.width)

    def compute(self, *inputs: Tensor) -> Tensor:
        """[B, T, W] -> [B, T, W]."""
        (tokens,) = inputs
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.mlp(self.mlp_norm(tokens))


class LanguageModel(Network):
    """The whole network."""

    starts_at_zero: ClassVar = ("bias", "attention.out.weight", "mlp.down.weight", "head.weight")
    deviations: ClassVar = {"embedding.weight": 1.0}
    position: Tensor

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(TextBlock(config=config) for _ in range(config.depth))
        self.final_norm = nn.RMSNorm(config.width, eps=NORM_EPSILON)
        self.head = nn.Linear(config.width, BYTES)
        self.register_buffer("position", torch.empty(0), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the fixed positions anew on the device of the weights (needed after leaving the meta device)."""
        places = torch.arange(self.config.context, device=self.embedding.weight.device)
        self.position = sinusoids(places, features=self.config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 in 0..255 with T <= context -> logits [B, T, 256] float32 of the byte that follows each."""
        embedded = self.embedding(tokens)
        states = embedded + self.position[: tokens.shape[1]].to(embedded.dtype)
        for block in self.blocks:
            states = block(states)
        return self.head(self.final_norm(states)).float()


def loss(model: Callable[[Tensor], Tensor], *, text: Tensor) -> Tensor:
    """Mean cross entropy per predicted byte of each sample in nats, [B] float32; text [B, T + 1] int64."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(dim=1)
