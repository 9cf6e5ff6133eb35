"""Previews as the engine prints them (`pulumi preview --json --show-sames`), built from what a case is about.

The form is that of the engine's PreviewDigest: states with inputs and outputs, `detailedDiff` by property path with
kinds such as `update-replace`, secrets already replaced by `[secret]`.
"""

from __future__ import annotations

import copy
import json
from typing import Any

PROJECT = "example-gkr-prod"
ULTRA_BLOCK = f"projects/{PROJECT}/reservations/ultra-east5/reservationBlocks/ultra-east5-block-0001"
MEGA_RESERVATION = f"projects/{PROJECT}/reservations/mega-central1"
POOL = "gcp:container/nodePool:NodePool"
CLUSTER = "gcp:container/cluster:Cluster"
BUCKET = "gcp:storage/bucket:Bucket"
NETWORK = "gcp:compute/network:Network"
LABELS = {"managed-by": "gkr", "gkr-stack": "prod-us-east5", "environment": "prod"}


def urn(resource_type: str, name: str, *, stack: str = "prod.us-east5") -> str:
    """The engine's name of a resource inside one of our components."""
    return f"urn:pulumi:{stack}::gkr::gkr:gcp:GpuPool${resource_type}::{name}"


def ultra_networks() -> list[dict[str, str]]:
    """gVNIC first, then eight RDMA subnets, in GKE's order."""
    rdma = [{"network": "us-east5-rdma", "subnetwork": f"us-east5-rdma-{index}"} for index in range(8)]
    return [{"network": "us-east5-gvnic", "subnetwork": "us-east5-gvnic"}, *rdma]


def ultra_pool(*, nodes: int | None = 320, capacity: str = "reservation", driver: str = "LATEST") -> dict[str, Any]:
    """Inputs of an A3 Ultra pool that no rule objects to."""
    config: dict[str, Any] = {
        "machineType": "a3-ultragpu-8g",
        "bootDisk": {"diskType": "hyperdisk-balanced", "sizeGb": 200},
        "ephemeralStorageLocalSsdConfig": {"localSsdCount": 32},
        "guestAccelerators": [
            {"type": "nvidia-h200-141gb", "count": 8, "gpuDriverInstallationConfig": {"gpuDriverVersion": driver}}
        ],
        "imageType": "COS_CONTAINERD",
        "resourceLabels": LABELS,
        "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}],
    }
    if capacity == "reservation":
        config["reservationAffinity"] = {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [ULTRA_BLOCK],
        }
    elif capacity == "spot":
        config["spot"] = True
    elif capacity == "flex-start":
        config["flexStart"] = True
    pool: dict[str, Any] = {
        "cluster": "us-east5", "location": "us-east5", "name": "ultra-1", "nodeLocations": ["us-east5-a"],
        "maxPodsPerNode": 32, "networkConfig": {"additionalNodeNetworkConfigs": ultra_networks(),
                                               "enablePrivateNodes": True}, "nodeConfig": config,
    }  # fmt: skip
    if nodes is None:
        pool["autoscaling"] = {"totalMaxNodeCount": 16, "totalMinNodeCount": 0}
    else:
        pool["nodeCount"] = nodes
    return pool


def cpu_pool(*, nodes: int = 3) -> dict[str, Any]:
    """Inputs of a pool without GPUs."""
    return {
        "cluster": "us-east5", "location": "us-east5", "name": "cpu", "nodeCount": nodes,
        "nodeLocations": ["us-east5-a", "us-east5-b", "us-east5-c"], "networkConfig": {"enablePrivateNodes": True},
        "nodeConfig": {"machineType": "n2-standard-32", "resourceLabels": LABELS},
    }  # fmt: skip


def cluster() -> dict[str, Any]:
    """Inputs of a cluster that no rule objects to."""
    return {
        "name": "us-east5", "location": "us-east5", "datapathProvider": "ADVANCED_DATAPATH",
        "enableMultiNetworking": True, "deletionProtection": True, "resourceLabels": LABELS,
        "privateClusterConfig": {"enablePrivateNodes": True}, "nodeConfig": {"machineType": "e2-standard-4"},
    }  # fmt: skip


def bucket() -> dict[str, Any]:
    """Inputs of a bucket that no rule objects to."""
    return {
        "name": "example-gkr-prod-us-east5", "location": "US-EAST5", "uniformBucketLevelAccess": True,
        "publicAccessPrevention": "enforced", "forceDestroy": False, "labels": LABELS,
        "hierarchicalNamespace": {"enabled": True},
    }  # fmt: skip


def state(resource_type: str, name: str, inputs: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """One side of a step."""
    return {"urn": urn(resource_type, name), "custom": True, "type": resource_type, "inputs": inputs, **flags}


def step(
    op: str, resource_type: str, name: str, *, old: dict[str, Any] | None = None, new: dict[str, Any] | None = None,
    protect: bool = False, diff: dict[str, str] | None = None, reasons: list[str] | None = None, **flags: Any,
) -> dict[str, Any]:  # fmt: skip
    """One step; `same` steps have equal sides."""
    if op == "same":
        new = old if new is None else new
    one: dict[str, Any] = {"op": op, "urn": urn(resource_type, name), "detailedDiff": None}
    if old is not None:
        one["oldState"] = state(resource_type, name, old, protect=protect, **flags)
    if new is not None and op != "delete":
        one["newState"] = state(resource_type, name, new, protect=protect, **flags)
    if diff is not None:
        one["detailedDiff"] = {path: {"kind": kind, "inputDiff": True} for path, kind in diff.items()}
    if reasons is not None:
        one["replaceReasons"] = reasons
    return copy.deepcopy(one)


def replaced(resource_type: str, name: str, *, old: dict[str, Any], new: dict[str, Any], **others: Any) -> list[Any]:
    """The three steps of a replacement that deletes first."""
    return [
        step("delete-replaced", resource_type, name, old=old, protect=others.get("protect", False)),
        step("replace", resource_type, name, old=old, new=new, **others),
        step("create-replacement", resource_type, name, old=old, new=new, **others),
    ]


def around() -> list[dict[str, Any]]:
    """What every region has besides its GPU pools, unchanged."""
    stack = {"op": "same", "urn": "urn:pulumi:prod.us-east5::gkr::pulumi:pulumi:Stack::gkr-prod.us-east5"}
    return [
        stack,
        step("same", CLUSTER, "us-east5", old=cluster(), protect=True),
        step("same", POOL, "cpu", old=cpu_pool()),
        step("same", BUCKET, "us-east5", old=bucket(), protect=True, retainOnDelete=True),
    ]


def digest(steps: list[dict[str, Any]], *, diagnostics: list[dict[str, str]] | None = None) -> str:
    """The engine's JSON."""
    summary: dict[str, int] = {}
    for one in steps:
        summary[one["op"]] = summary.get(one["op"], 0) + 1
    return json.dumps(
        {"config": {"gkr:stack": "{...}"}, "steps": steps, "diagnostics": diagnostics or [], "changeSummary": summary}
    )


def protected_error(resource_type: str, name: str) -> dict[str, str]:
    """What the engine says when a protected resource would be replaced."""
    return {
        "urn": urn(resource_type, name), "severity": "error",
        "message": f'error: unable to replace resource "{urn(resource_type, name)}"\nas it is currently marked for'
        " protection. To unprotect the resource, remove the `protect` flag from the resource in your Pulumi program"
        " and run `pulumi up`",
    }  # fmt: skip
