"""Small exchanges between the ranks of a learner, over the CPU backend and without pickle: bytes and float32 vectors of
unequal length. `group`: ranks that are asked; default all, on the group of the training path."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def all_gather_json(value: Any, *, group: Group = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank. For small things: receipts, names, digests."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = _sizes(data.numel(), group)
    parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, _padded(data, max(sizes)), group=group)
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)]


def gather_floats(vector: np.ndarray, *, group: Group = None) -> list[np.ndarray] | None:
    """Every rank's float32 vector on rank 0, in rank order; none elsewhere."""
    own = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.float32))
    sizes = _sizes(own.numel(), group)
    first = dist.get_rank() == 0
    parts = [torch.empty(max(sizes)) for _ in sizes] if first else None
    dist.gather(_padded(own, max(sizes)), parts, group=group)
    if parts is None:
        return None
    return [part[:size].numpy() for part, size in zip(parts, sizes, strict=True)]


def _sizes(own: int, group: Group) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([own], dtype=torch.int64), group=group)
    return [int(size) for size in sizes]


def _padded(vector: Tensor, size: int) -> Tensor:
    padded = torch.zeros(size, dtype=vector.dtype)
    padded[: vector.numel()] = vector
    return padded
