"""Node pools: values by machine, where machines come from, and the order of their networks."""

from __future__ import annotations

from typing import Any

import pytest

from infra.components.gcp.nodes import DRANET_LABEL, RESERVATION_KEY
from infra.review.fields import replaces
from spec.machines import machine
from spec.stack_fabric import fabric_networks
from tests.builders.recorded_clouds import GPU_POOL, gpu_pool, run_region, run_shipped

ULTRA, MEGA, SMALL = "prod.us-east5", "prod.us-central1", "dev.us-east4"


def attached(inputs: dict[str, Any]) -> list[tuple[str, str]]:
    found = inputs["networkConfig"].get("additionalNodeNetworkConfigs", [])
    return [(one["network"], one["subnetwork"]) for one in found]


def test_ultra() -> None:
    inputs = gpu_pool(ULTRA, "ultra-1")
    node = inputs["nodeConfig"]
    assert (inputs["location"], inputs["nodeLocations"], inputs["nodeCount"]) == ("us-east5", ["us-east5-a"], 320)
    assert inputs["maxPodsPerNode"] == 32
    assert node["machineType"] == "a3-ultragpu-8g"
    [gpus] = node["guestAccelerators"]
    assert (gpus["type"], gpus["count"]) == ("nvidia-h200-141gb", 8)
    assert gpus["gpuDriverInstallationConfig"] == {"gpuDriverVersion": "LATEST"}
    assert node["bootDisk"]["diskType"] == "hyperdisk-balanced"
    assert node["ephemeralStorageLocalSsdConfig"] == {"localSsdCount": 32}
    assert node["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}]
    assert node["metadata"] == {"disable-legacy-endpoints": "true"}
    assert node["imageType"] == "COS_CONTAINERD"
    assert not {"fastSocket", "spot", "flexStart", "hostMaintenancePolicy", "diskType"} & set(node)
    assert not {"placementPolicy", "autoscaling", "initialNodeCount", "queuedProvisioning"} & set(inputs)
    assert inputs["upgradeSettings"] == {"strategy": "SURGE", "maxSurge": 0, "maxUnavailable": 20}


def test_networks_of_ultra_in_the_order_of_its_nics() -> None:
    lanes = [("us-east5-rdma", f"us-east5-rdma-{index}") for index in range(8)]
    assert attached(gpu_pool(ULTRA, "ultra-1")) == [("us-east5-gvnic-1", "us-east5-gvnic-1"), *lanes]


def test_networks_of_mega_have_no_ninth() -> None:
    names = [f"us-central1-vpc{index}" for index in range(1, 9)]
    assert attached(gpu_pool(MEGA, "mega-1")) == [(name, name) for name in names]


@pytest.mark.parametrize(("stack", "pool"), [(ULTRA, "ultra-2"), (MEGA, "mega-2"), (SMALL, "mega-spot")])
def test_as_many_networks_as_the_machine_has(stack: str, pool: str) -> None:
    inputs = gpu_pool(stack, pool)
    row = machine(inputs["nodeConfig"]["machineType"])
    assert len(attached(inputs)) == row.extra_networks == len(fabric_networks(row))


def test_a_reservation_is_named_in_full_and_alone() -> None:
    path = "projects/example-gkr-prod/reservations/ultra-east5/reservationBlocks/ultra-east5-block-0002"
    assert gpu_pool(ULTRA, "ultra-2")["nodeConfig"]["reservationAffinity"] == {
        "consumeReservationType": "SPECIFIC_RESERVATION", "key": RESERVATION_KEY, "values": [path],
    }  # fmt: skip


def test_maintenance_is_the_reservations() -> None:
    node = gpu_pool(MEGA, "mega-1")["nodeConfig"]
    assert node["hostMaintenancePolicy"] == {"maintenanceInterval": "PERIODIC"}


def test_a_reservation_that_is_not_delivered_has_no_nodes_yet() -> None:
    assert gpu_pool(MEGA, "mega-2")["nodeCount"] == 0
    assert gpu_pool(MEGA, "mega-2", "reservations[1].delivered=true")["nodeCount"] == 64


def test_spot() -> None:
    inputs = gpu_pool(SMALL, "mega-spot")
    assert inputs["nodeConfig"]["spot"] is True
    assert inputs["nodeConfig"]["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}
    assert inputs["nodeCount"] == 2


def test_flex_start() -> None:
    inputs = gpu_pool(SMALL, "mega-flex")
    assert "nodeCount" not in inputs
    assert inputs["autoscaling"] == {"totalMinNodeCount": 0, "totalMaxNodeCount": 2, "locationPolicy": "ANY"}
    assert inputs["queuedProvisioning"] == {"enabled": True}
    assert inputs["management"]["autoRepair"] is False
    node = inputs["nodeConfig"]
    assert (node["flexStart"], node["maxRunDuration"]) == (True, "86400s")
    assert node["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}


def test_dranet_has_no_networks_of_ours() -> None:
    recorded = run_region(ULTRA, "fabrics={a3-ultra: {mode: dranet}}")
    inputs = recorded.one(GPU_POOL, "ultra-1").inputs
    assert inputs["networkConfig"] == {"enablePrivateNodes": True, "acceleratorNetworkProfile": "auto"}
    assert inputs["nodeConfig"]["labels"] == {DRANET_LABEL: "true"}
    assert not recorded.of("gcp:compute/network:Network")
    assert recorded.outputs["facts"]["fabrics"] == [{"machine": "a3-ultra", "networks": []}]


def test_gpu_pools_wait_for_cpus_and_networks() -> None:
    waits = set(run_shipped(ULTRA).one(GPU_POOL, "ultra-1").depends_on)
    assert {"cpu", "gvnic-1", "rdma", *(f"rdma-{index}" for index in range(8))} <= waits


def test_the_cpu_pool_is_in_several_zones_and_grows() -> None:
    inputs = gpu_pool(ULTRA, "cpu")
    assert inputs["nodeLocations"] == ["us-east5-a", "us-east5-b", "us-east5-c"]
    assert (inputs["autoscaling"]["totalMinNodeCount"], inputs["autoscaling"]["totalMaxNodeCount"]) == (3, 40)
    assert "guestAccelerators" not in inputs["nodeConfig"]


def test_pools_are_protected_replaced_in_order_and_given_time() -> None:
    for one in run_shipped(ULTRA).of(GPU_POOL):
        assert one.protect
        assert one.delete_before_replace
        assert not one.retain_on_delete
        assert one.timeouts == ("2h", "2h", "2h")
        assert set(one.ignore_changes) == {"version", "initialNodeCount"}
    assert not any(one.protect for one in run_shipped(SMALL).of(GPU_POOL))


def test_one_pool_can_be_protected_in_a_stack_that_is_not() -> None:
    recorded = run_region(SMALL, "gpu_pools[0].protect=true")
    assert [one.name for one in recorded.of(GPU_POOL) if one.protect] == ["mega-spot"]


@pytest.mark.parametrize(
    ("change", "path", "new"),
    [
        ("gpu_pools[0].nodes=319", "nodeCount", False),
        ("gpu_pools[0].upgrade.max_unavailable=5", "upgradeSettings.maxUnavailable", False),
        ("gpu_pools[0].driver=DEFAULT",
         "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig.gpuDriverVersion", True),
        ("gpu_pools[0].max_pods_per_node=64", "maxPodsPerNode", True),
        ("gpu_pools[0].capacity.reservation=projects/example-gkr-prod/reservations/ultra-east5/reservationBlocks/b3",
         "nodeConfig.reservationAffinity.values[0]", True),
    ],
)  # fmt: skip
def test_a_change_of_configuration_touches_what_the_table_of_fields_says(change: str, path: str, *, new: bool) -> None:
    before, after = _flat(gpu_pool(ULTRA, "ultra-1")), _flat(gpu_pool(ULTRA, "ultra-1", change))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {path}
    assert any(replaces(GPU_POOL, key) for key in changed) is new


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        parts = [_flat(one, f"{prefix}.{key}" if prefix else key) for key, one in value.items()]
    elif isinstance(value, list):
        parts = [_flat(one, f"{prefix}[{index}]") for index, one in enumerate(value)]
    else:
        return {prefix: value}
    return {key: one for part in parts for key, one in part.items()}
