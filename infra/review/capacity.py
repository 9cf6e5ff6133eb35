"""GPUs before and after, by region, type and where they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.policy.gpus import NODE_POOL
from infra.policy.resource import items, look
from infra.review.preview import Preview, State, Step
from spec.machines import CATALOGUE

RESERVATION_TYPES = ("gcp:compute/reservation:Reservation", "gcp:compute/futureReservation:FutureReservation")


@dataclass(frozen=True)
class Place:
    """One row of the table."""

    region: str
    gpu: str
    """Token of the machine catalogue, such as H200."""
    capacity: str
    """A reservation's path, `spot`, `flex-start` or `on-demand`."""


@dataclass
class Count:
    """GPUs at one place."""

    before: int = 0
    after: int = 0
    replaced: int = 0
    """Of those that stay, how many go away for a while because their pool is made anew."""
    pools: list[str] = field(default_factory=list[str])


def gpus_by_place(preview: Preview) -> dict[Place, Count]:
    """Every place that has GPUs before or after; pools that the preview leaves out are not in it."""
    found: dict[Place, Count] = {}
    for step in preview.steps:
        if step.type != NODE_POOL:
            continue
        before = None if step.kind == "create" else step.old
        after = None if step.kind == "delete" else step.new
        for state, is_after in ((before, False), (after, True)):
            if state is None or not gpus_per_node(state.inputs):
                continue
            count = found.setdefault(_place(state), Count())
            gpus = nodes(state) * gpus_per_node(state.inputs)
            count.after += gpus if is_after else 0
            count.before += 0 if is_after else gpus
            count.replaced += gpus if not is_after and step.kind == "replace" else 0
            if step.name not in count.pools:
                count.pools.append(step.name)
    return dict(sorted(found.items(), key=lambda one: (one[0].region, one[0].gpu, one[0].capacity)))


def gpus_per_node(inputs: Mapping[str, Any]) -> int:
    """GPUs of one machine of a pool or of a reservation; 0 for CPU machines."""
    for path, count in (
        ("nodeConfig.guestAccelerators", "count"),
        ("specificReservation.instanceProperties.guestAccelerators", "acceleratorCount"),
    ):
        total = sum(int(look(one, count) or 0) for one in items(look(inputs, path)))
        if total:
            return total
    name = look(inputs, "nodeConfig.machineType") or look(inputs, "specificReservation.instanceProperties.machineType")
    row = next((one for one in CATALOGUE if one.machine_type == name), None)
    return row.gpus if row else 0


def nodes(state: State) -> int:
    """Nodes of a pool: its fixed number, or the most that its autoscaler may make."""
    fixed = look(state.inputs, "nodeCount")
    zones = max(1, len(items(look(state.inputs, "nodeLocations"))))
    if isinstance(fixed, (int, float)):
        return math.floor(fixed) * zones
    total = look(state.inputs, "autoscaling.totalMaxNodeCount")
    if isinstance(total, (int, float)):
        return math.floor(total)
    each = look(state.inputs, "autoscaling.maxNodeCount")
    return math.floor(each) * zones if isinstance(each, (int, float)) else 0


def pool_gpus(step: Step) -> int:
    """GPUs of a pool before the change."""
    return nodes(step.old) * gpus_per_node(step.old.inputs) if step.old and step.type == NODE_POOL else 0


def reserved_gpus(step: Step) -> int:
    """GPUs that a reservation of ours holds before the change."""
    if step.old is None or step.type not in RESERVATION_TYPES:
        return 0
    count = look(step.old.inputs, "specificReservation.count") or look(
        step.old.inputs, "specificSkuProperties.totalCount"
    )
    per_node = gpus_per_node(step.old.inputs) or _future_gpus(step.old.inputs)
    return int(float(count or 0)) * per_node


def _future_gpus(inputs: Mapping[str, Any]) -> int:
    name = look(inputs, "specificSkuProperties.instanceProperties.machineType")
    return next((one.gpus for one in CATALOGUE if one.machine_type == name), 0)


def capacity_of(inputs: Mapping[str, Any]) -> str:
    """Where a pool's machines come from."""
    values = items(look(inputs, "nodeConfig.reservationAffinity.values"))
    if values:
        return str(values[0])
    if look(inputs, "nodeConfig.spot") is True:
        return "spot"
    if look(inputs, "nodeConfig.flexStart") is True or look(inputs, "queuedProvisioning.enabled") is True:
        return "flex-start"
    return "on-demand"


def _place(state: State) -> Place:
    accelerator = look(state.inputs, "nodeConfig.guestAccelerators[0].type")
    machine = look(state.inputs, "nodeConfig.machineType")
    row = next((one for one in CATALOGUE if machine == one.machine_type or accelerator == one.accelerator), None)
    gpu = row.gpu if row and row.gpu else str(accelerator or machine or "unknown")
    return Place(_region(state), gpu, capacity_of(state.inputs))


def _region(state: State) -> str:
    location = look(state.inputs, "location") or look(state.outputs, "location")
    zone = look(state.inputs, "nodeLocations[0]")
    place = str(location or zone or "unknown")
    parts = place.split("-")
    return "-".join(parts[:2]) if len(parts) == 3 and len(parts[2]) == 1 else place
