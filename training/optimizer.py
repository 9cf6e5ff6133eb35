"""The inner optimizer: AdamW on this rank's shards, and its learning rate as a function of samples.

The optimizer works on plain views of the local shards, not on the DTensors: a sharded update needs no communication,
the fused kernel takes all tensors at once, and both moments lie in one flat vector each, in the order of
`parallel.flat_ranges`, ready to be saved or loaded.
"""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spec.train import TrainConfig
from training.parallel import flat_ranges, local_tensor

# torch.optim imports this at the first optimizer; here a zygote pays the seconds once, before it forks ranks.
importlib.import_module("torch._dynamo")


def learning_rate(config: TrainConfig, *, samples: int) -> float:
    """The rate for the step that starts after `samples` samples of all learners together: linear warm-up, then half a
    cosine.

    It never is zero in a step of the warm-up: the first step counts as one batch. After config.samples it stays at its
    final share.
    """
    if samples < config.warmup_samples:
        return config.learning_rate * min(1.0, (samples + config.batch) / config.warmup_samples)
    span = max(1, config.samples - config.warmup_samples)
    progress = 1.0 if samples >= config.samples else (samples - config.warmup_samples) / span
    share = config.final_learning_rate_share
    return config.learning_rate * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * progress)))


class ShardedAdamW:
    """AdamW over the local shards; decay on matrices only. Identical updates on identical shards, whatever the mesh."""

    def __init__(self, model: nn.Module, *, config: TrainConfig) -> None:
        self._ranges = flat_ranges(model)
        total = sum(one.length for one in self._ranges)
        device = next(model.parameters()).device
        self.exp_avg = torch.zeros(total, dtype=torch.float32, device=device)
        """First moment, flat."""
        self.exp_avg_sq = torch.zeros(total, dtype=torch.float32, device=device)
        """Second moment, flat."""
        self._views: list[nn.Parameter] = []
        self._held = [one for one in self._ranges if one.length]
        for one in self._held:
            self._views.append(nn.Parameter(local_tensor(one.parameter)))
        decayed = [view for one, view in zip(self._held, self._views, strict=True) if one.parameter.ndim >= 2]
        plain = [view for one, view in zip(self._held, self._views, strict=True) if one.parameter.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]] or groups[:1],
            lr=config.learning_rate, betas=config.betas, fused=True,
        )  # fmt: skip
        self.restore(steps=0)

    @property
    def steps(self) -> int:
        """Updates so far (Adam's bias correction counts them)."""
        return self._steps

    def restore(self, *, steps: int, exp_avg: Tensor | None = None, exp_avg_sq: Tensor | None = None) -> None:
        """Take up saved moments in place; without them, start from zero."""
        self._steps = steps
        for moment, saved in ((self.exp_avg, exp_avg), (self.exp_avg_sq, exp_avg_sq)):
            moment.zero_() if saved is None else moment.copy_(saved)
        lengths = [one.length for one in self._held]
        firsts, seconds = self.exp_avg.split(lengths), self.exp_avg_sq.split(lengths)
        for view, first, second in zip(self._views, firsts, seconds, strict=True):
            self._adamw.state[view] = {
                "step": torch.full((), float(steps), dtype=torch.float32, device=view.device),
                "exp_avg": first.view_as(view),
                "exp_avg_sq": second.view_as(view),
            }

    def gradient_norm(self) -> Tensor:
        """L2 norm of this rank's gradients; also takes up the gradients of the last backward pass for `step`."""
        for one, view in zip(self._held, self._views, strict=True):
            view.data = local_tensor(one.parameter)  # FSDP may have moved the shard since the last step
            gradient = one.parameter.grad
            view.grad = None if gradient is None else local_tensor(gradient)
        gradients = [view.grad for view in self._views if view.grad is not None]
        return get_total_norm(gradients) if gradients else torch.zeros((), device=self.exp_avg.device)

    def step(self, *, learning_rate: float, gradient_norm: float, gradient_clip: float) -> None:
        """One update with the gradients scaled so that the global norm is at most `gradient_clip`."""
        if gradient_norm > gradient_clip:
            clip_grads_with_norm_(self._views, gradient_clip, torch.tensor(gradient_norm))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._steps += 1

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for one, view in zip(self._held, self._views, strict=True):
            one.parameter.grad = None
            view.grad = None
        for one in self._ranges:
            one.parameter.grad = None
