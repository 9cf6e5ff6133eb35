"""The average of the weights over recent steps: what is evaluated and published. Sharded like the weights, float32,
updated in place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from training.parallel import flat_ranges, gather_local, local_tensor


class Ema:
    """ema <- decay * ema + (1 - decay) * weights after each step; starts as the weights."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._ranges = [one for one in flat_ranges(model) if one.length]
        self._average = get_ema_multi_avg_fn(decay)
        self.vector = gather_local(model)
        """This rank's part in the order of `parallel.flat_ranges`; read it, or set it with `assign`."""
        parts = self.vector.split([one.length for one in self._ranges])
        self._parts = [part.view_as(local_tensor(one.parameter)) for one, part in zip(self._ranges, parts, strict=True)]

    def update(self) -> None:
        """Take in the weights as they are now."""
        if self._parts:
            with torch.no_grad():
                self._average(self._parts, [local_tensor(one.parameter) for one in self._ranges], 0)

    def assign(self, flat: Tensor) -> None:
        """Overwrite this rank's part."""
        self.vector.copy_(flat)
