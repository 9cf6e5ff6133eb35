"""Rules for GPU node pools: where the capacity comes from, who may land there, and the networks between the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infra.policy.resource import Finding, Resource, Settings, finding, has_gpus, is_set, look, machine_of

NODE_POOL = "gcp:container/nodePool:NodePool"
GPU_TAINT = "nvidia.com/gpu"


def gpu_capacity(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """GPU machines come from a named reservation, from spot or from flex-start: on-demand has none to give."""
    del settings
    if resource.type != NODE_POOL or not has_gpus(resource):
        return
    config = resource.get("nodeConfig")
    kinds = {
        "reservation": look(config, "reservationAffinity.consumeReservationType") == "SPECIFIC_RESERVATION",
        "spot": is_set(look(config, "spot")),
        "flex-start": is_set(look(config, "flexStart")) or is_set(resource.get("queuedProvisioning.enabled")),
    }
    chosen = [kind for kind, given in kinds.items() if given]
    if not chosen:
        yield finding(
            resource, "gpu-capacity",
            message="GPU machines without a reservation, spot or flex-start: the pool would wait for on-demand capacity"
            " that does not exist, or pay for it beside a reservation that stays empty",
            remedy="set capacity.kind of the pool to reservation, spot or flex-start",
        )  # fmt: skip
    elif "reservation" in chosen and len(chosen) > 1:
        yield finding(
            resource, "gpu-capacity",
            message=f"capacity is {' and '.join(chosen)} at once, which the cloud refuses",
            remedy="choose one kind of capacity",
        )  # fmt: skip


def gpu_taint(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """A declared taint keeps everything else off GPU nodes; GKE's own is absent if the GPU pool is the only pool."""
    del settings
    if resource.type != NODE_POOL or not has_gpus(resource):
        return
    if not any(_is_gpu_taint(one) for one in resource.each("nodeConfig.taints")):
        yield finding(
            resource, "gpu-taint",
            message=f"no taint {GPU_TAINT} with effect NO_SCHEDULE: any pod could take a GPU node's CPU and memory",
            remedy=f"declare the taint {GPU_TAINT}=present:NO_SCHEDULE on the pool",
        )  # fmt: skip


def _is_gpu_taint(taint: Any) -> bool:
    return look(taint, "key") == GPU_TAINT and look(taint, "effect") in ("NO_SCHEDULE", "NO_EXECUTE")


def gpu_fabric(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """As many extra networks as the machine has: one missing, or one too many, takes a NIC from a GPU."""
    del settings
    row = machine_of(resource) if resource.type == NODE_POOL else None
    if row is None or not row.gpus:
        return
    attached = len(resource.each("networkConfig.additionalNodeNetworkConfigs"))
    managed = is_set(resource.get("networkConfig.acceleratorNetworkProfile"))
    wanted = 0 if managed else row.extra_networks
    if attached != wanted:
        why = "by a pool with an accelerator network profile" if managed else f"by {row.machine_type}"
        yield finding(
            resource, "gpu-fabric",
            message=f"{attached} additional networks, {wanted} are needed {why}: GPU-to-GPU traffic would lose NICs or"
            " fall back to TCP",
            remedy="attach the networks that the fabric of this pool gives, all of them and in its order",
        )  # fmt: skip
