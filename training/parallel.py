"""Ranks of one learner as one model: process group, mesh, sharding, and flat access to what this rank holds.

The mesh is replicate x shard: the weights are split over the `shard` axis and copied along `replicate`, so that heavy
traffic stays inside a group of close machines. The same code runs over gloo on CPUs and over NCCL on GPUs, and at world
size 1.

Flat access is what the rest of the trainer uses to exchange state: parameters in order of their names, each as a
contiguous range of elements of the whole row-major tensor, because FSDP splits along the first dimension only.
Everything that leaves a rank is float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from spec.errors import ConfigError
from spec.train import TrainConfig
from training.models.families import make_network
from training.models.network import Network, RecomputedBlock, initial_tensors

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def init_process_group(
    rank: int, *, world_size: int, init_method: str, device: torch.device, timeout_seconds: float
) -> None:
    """Join the other ranks; every collective on CPU tensors goes over gloo, on CUDA tensors over NCCL.

    init_method: `tcp://host:port` or `file:///path`. No collective waits longer than `timeout_seconds`.
    """
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if on_gpu else None,
    )


def close_process_group() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_mesh(world_size: int, *, shard_size: int | None, device_type: str) -> DeviceMesh:
    """The learner's mesh: one axis `shard` if all ranks share one copy, else `replicate` x `shard`."""
    size = min(shard_size or world_size, world_size)
    if world_size % size:
        raise ConfigError(
            f"train.shard_size {size} does not divide the {world_size} ranks of the learner",
            hint=f"choose a divisor of {world_size}, or leave shard_size out to share one copy between all ranks",
        )
    if size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("replicate", "shard"))


def is_primary_replica(mesh: DeviceMesh) -> bool:
    """True on the ranks that speak for all copies: they write checkpoints and upload contributions."""
    return mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0


def build_model(train: TrainConfig, *, mesh: DeviceMesh, device: torch.device) -> Network:
    """The sharded model with its initial weights; no rank ever holds all of them."""
    with torch.device("meta"):
        model = make_network(train.model)
    shard_model(model, mesh=mesh, train=train)
    model.to_empty(device=device)
    model.reset_buffers()
    own = {one.name: one for one in flat_ranges(model)}
    with torch.no_grad():
        for name, whole in initial_tensors(model, seed=train.seed):
            part = own[name]
            local = local_tensor(part.parameter)
            local.copy_(whole.view(-1)[part.start : part.start + part.length].view_as(local))
    return model


def shard_model(model: Network, *, mesh: DeviceMesh, train: TrainConfig) -> None:
    """Split the model in place, block by block: float32 masters, compute in train.dtype, gradients reduced in float32.

    Inputs are not cast: the model casts by the dtype of its weights, and keeps the time exact until then.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES[train.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in cast("Iterator[RecomputedBlock]", iter(model.blocks)):
        block.recompute = train.activation_checkpointing
        if train.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class FlatRange(NamedTuple):
    """What this rank holds of one parameter: `length` elements from `start` of the whole row-major tensor."""

    name: str
    parameter: nn.Parameter
    start: int
    length: int


def flat_ranges(model: nn.Module) -> list[FlatRange]:
    """This rank's ranges in order of the parameters' names; a parameter of which it holds nothing has length 0."""
    sharded = isinstance(model, FSDPModule)
    ranges: list[FlatRange] = []
    for name, parameter in sorted(model.named_parameters()):
        start, length = 0, parameter.numel()
        if isinstance(parameter, DTensor):
            start, length = _shard_of(parameter)
        else:
            assert not sharded, f"{name} is gathered: call reshard() after a forward pass without a backward pass"
        ranges.append(FlatRange(name, parameter, start, length))
    return ranges


def _shard_of(tensor: DTensor) -> tuple[int, int]:
    """Start and length of the local shard, by the rule of torch.chunk that FSDP follows."""
    axis = next((index for index, one in enumerate(tensor.placements) if one == Shard(0)), None)
    if axis is None:
        return 0, tensor.numel()
    rows, mesh = tensor.shape[0], tensor.device_mesh
    chunk = -(-rows // mesh.size(axis))
    first = min(mesh.get_local_rank(axis) * chunk, rows)
    row = tensor.numel() // rows
    length = (min(first + chunk, rows) - first) * row
    assert length == tensor.to_local().numel(), "FSDP no longer splits by torch.chunk along the first dimension"
    return first * row, length


def local_tensor(tensor: Tensor) -> Tensor:
    """The elements that this rank holds, sharing their memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def gather_local(model: nn.Module) -> Tensor:
    """A copy of this rank's elements as one float32 vector in the order of `flat_ranges`, on the model's device."""
    with torch.no_grad():
        return torch.cat([local_tensor(one.parameter).reshape(-1).float() for one in flat_ranges(model)])


def assign_local(model: nn.Module, flat: Tensor) -> None:
    """Overwrite this rank's elements from a vector in the order of `flat_ranges`."""
    expected = sum(one.length for one in flat_ranges(model))
    assert flat.numel() == expected, f"{flat.numel()} elements for {expected}"
    assign_part(model, flat, first=0)


def copy_part(model: nn.Module, out: Tensor, *, first: int) -> None:
    """Copy elements from `first` on, in the order of `flat_ranges`, as many as `out` has; does not wait for a GPU."""
    for piece, values in _pieces(model, out, first=first):
        values.copy_(piece, non_blocking=True)


def assign_part(model: nn.Module, values: Tensor, *, first: int) -> None:
    """Overwrite elements from `first` on in the order of `flat_ranges`."""
    for piece, part in _pieces(model, values, first=first):
        piece.copy_(part)


def add_part(model: nn.Module, values: Tensor, *, first: int) -> None:
    """Add to elements from `first` on in the order of `flat_ranges`; `values` lie on the model's device."""
    for piece, part in _pieces(model, values, first=first):
        piece.add_(part)


def _pieces(model: nn.Module, values: Tensor, *, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of this rank's elements and of the values that belong to them."""
    position, stop = 0, first + values.numel()
    for one in flat_ranges(model):
        low, high = max(position, first), min(position + one.length, stop)
        if low < high:
            flat = local_tensor(one.parameter).view(-1)
            yield flat[low - position : high - position], values[low - first : high - first]
        position += one.length


def replica_count(model: nn.Module) -> int:
    """Copies of the weights that the learner holds."""
    first = next(model.parameters())
    if not isinstance(first, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    mesh = first.device_mesh
    return 1 if mesh.ndim == 1 else mesh.size(0)


def broadcast_json(value: Any, *, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The value that rank `source` passed, on every rank. JSON on the CPU: no pickle, no wait for the device."""
    data = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, source, group=group)
    body = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(int(size.item()), dtype=torch.uint8)
    )
    dist.broadcast(body, source, group=group)
    return json.loads(bytes(body.numpy()))


def lowest_rank_where(condition: bool) -> int | None:  # noqa: FBT001
    """The lowest rank that passed true, known to all ranks; none if no rank did."""
    world = dist.get_world_size()
    lowest = torch.tensor([dist.get_rank() if condition else world], dtype=torch.int64)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return None if int(lowest.item()) == world else int(lowest.item())
