"""Objects of Kubernetes, Kueue and KubeRay as a bed returned them, cut to the fields that views read."""

from __future__ import annotations

from typing import Any

from spec.machines import machine

RUN = "20261130-181727-ca6905"
NOW = 1_796_062_647.0
"""2026-11-30T18:17:27Z."""
STARTED = "2026-11-30T18:15:27Z"
"""Two minutes before."""

Json = dict[str, Any]


def labels(experiment: str = "big", *, run: str = RUN, role: str = "trainer", group: str = "trainer") -> Json:
    return {
        "gkr/experiment": experiment,
        "gkr/run": run,
        "gkr/learner": experiment,
        "gkr/role": role,
        "gkr/group": group,
    }


def node(name: str, *, row: str = "a3-ultra", ready: bool = True, **changes: Any) -> Json:
    kind = machine(row)
    index = int(name.rpartition("-")[2])
    block, subblock = f"{row}-b{index // 64}", f"{row}-b{index // 64}-s{index // 16 % 4}"
    place = "cloud.google.com/gce-topology"
    found: Json = {
        "metadata": {"name": name, "labels": {**kind.labels, f"{place}-block": block, f"{place}-subblock": subblock}},
        "spec": {"unschedulable": changes.get("cordoned", False)},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(changes.get("gpus", kind.gpus))},
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "Unknown",
                    "reason": "KubeletReady" if ready else "NodeStatusUnknown",
                }
            ],
        },
    }
    return found


def container(*, gpus: int = 0, image: str = "trainer:1", name: str = "ray") -> Json:
    amounts = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {"name": name, "image": image, "resources": {"requests": {"cpu": "1", **amounts}, "limits": amounts}}


def affinity(accelerator: str) -> Json:
    term = {
        "matchExpressions": [{"key": "cloud.google.com/gke-accelerator", "operator": "In", "values": [accelerator]}]
    }
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def pod(
    name: str,
    *,
    node_name: str = "",
    gpus: int = 0,
    phase: str = "Running",
    ready: bool = True,
    own_labels: Json | None = None,
    accelerator: str = "",
    conditions: list[Json] | None = None,
    containers: list[Json] | None = None,
    init: list[Json] | None = None,
    namespace: str = "gkr-0",
) -> Json:
    """`containers`, `init`: statuses of its containers."""
    spec: Json = {"containers": [container(gpus=gpus)]}
    if node_name:
        spec["nodeName"] = node_name
    if accelerator:
        spec["affinity"] = affinity(accelerator)
    found = [{"type": "Ready", "status": "True" if ready and phase == "Running" else "False"}, *(conditions or [])]
    status: Json = {"phase": phase, "conditions": found, "startTime": STARTED}
    status |= {"containerStatuses": containers} if containers else {}
    status |= {"initContainerStatuses": init} if init else {}
    meta = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "labels": labels() if own_labels is None else own_labels,
    }
    return {"metadata": meta, "spec": spec, "status": status}


def unscheduled(message: str, *, reason: str = "Unschedulable") -> list[Json]:
    return [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]


def event(about: str, *, reason: str, message: str, kind: str = "Warning", at: str = STARTED) -> Json:
    return {
        "involvedObject": {"name": about, "uid": f"uid-{about}"},
        "reason": reason,
        "message": message,
        "type": kind,
        "lastTimestamp": at,
    }


def rayjob(*, name: str = "big-ca6905", deployment: str = "Running", job: str = "", **changes: Any) -> Json:
    return {
        "metadata": {
            "name": name,
            "namespace": "gkr-0",
            "uid": f"uid-{name}",
            "labels": {"kueue.x-k8s.io/queue-name": "research"},
        },
        "spec": {},
        "status": {"jobDeploymentStatus": deployment, "jobStatus": job, "rayClusterName": f"{name}-abcde", **changes},
    }


def pod_set(
    name: str = "trainer", *, count: int, gpus: int = 8, accelerator: str = "nvidia-h200-141gb", required: str = "",
    experiment: str = "big", run: str = RUN,
) -> Json:  # fmt: skip
    spec: Json = {"containers": [container(gpus=gpus)]}
    if gpus:
        spec["affinity"] = affinity(accelerator)
    level = {"required": required} if required else {"preferred": "cloud.google.com/gce-topology-subblock"}
    return {
        "name": name,
        "count": count,
        "template": {
            "metadata": {"labels": labels(experiment, run=run, role="trainer" if gpus else "head", group=name)},
            "spec": spec,
        },
        **({"topologyRequest": level} if gpus else {}),
    }


def workload(
    name: str = "rayjob-big-ca6905-f2769",
    *,
    sets: list[Json],
    conditions: list[Json] | None = None,
    admitted: dict[str, Json] | None = None,
    priority: int = 0,
    namespace: str = "gkr-0",
    created: str = STARTED,
    **changes: Any,
) -> Json:
    """`admitted`: pod set -> {flavor: {resource: amount}}."""
    status: Json = {"conditions": conditions or []}
    if admitted is not None:
        given = [
            {
                "name": one,
                "flavors": {resource: flavor for flavor, amounts in by_flavor.items() for resource in amounts},
                "resourceUsage": {
                    resource: amount for amounts in by_flavor.values() for resource, amount in amounts.items()
                },
            }
            for one, by_flavor in admitted.items()
        ]
        status["admission"] = {"clusterQueue": "research", "podSetAssignments": given}
        status["conditions"] = [*is_true("QuotaReserved"), *is_true("Admitted"), *status["conditions"]]
    status |= changes.pop("status", {})
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "creationTimestamp": created,
            "ownerReferences": [{"kind": "RayJob", "name": name.removeprefix("rayjob-").rpartition("-")[0]}],
        },
        "spec": {"podSets": sets, "queueName": "research", "priority": priority, **changes},
        "status": status,
    }


def is_true(kind: str, *, at: str = STARTED) -> list[Json]:
    return [{"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": at}]


def pending(message: str, *, reason: str = "Pending") -> list[Json]:
    return [{"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}]


def local_queue(
    name: str = "research", *, namespace: str = "gkr-0", home: str = "research", active: bool = True
) -> Json:
    state = {
        "type": "Active",
        "status": "True" if active else "False",
        "message": "Can submit new workloads to localQueue",
    }
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterQueue": home},
        "status": {"conditions": [state]},
    }


def cluster_queue(
    *, used: float = 512, nominal: float = 512, preemption: str = "LowerPriority", active: bool = True
) -> Json:
    state = {
        "type": "Active",
        "status": "True" if active else "False",
        "message": "Can't admit new workloads: is stopped.",
    }
    cpu = {
        "name": "cpu",
        "resources": [{"name": "cpu", "nominalQuota": "1700m"}, {"name": "nvidia.com/gpu", "nominalQuota": "0"}],
    }
    gpu = {
        "name": "a3-ultra",
        "resources": [
            {"name": "cpu", "nominalQuota": "14080"},
            {"name": "nvidia.com/gpu", "nominalQuota": str(nominal)},
        ],
    }
    usage = [
        {
            "name": "a3-ultra",
            "resources": [{"name": "nvidia.com/gpu", "total": str(used)}, {"name": "cpu", "total": "64"}],
        }
    ]
    return {
        "metadata": {"name": "research"},
        "spec": {"resourceGroups": [{"flavors": [cpu, gpu]}], "preemption": {"withinClusterQueue": preemption}},
        "status": {"flavorsReservation": usage, "conditions": [state], "pendingWorkloads": 1},
    }


def flavors() -> list[Json]:
    return [
        {"metadata": {"name": "cpu"}, "spec": {"nodeLabels": {"node.kubernetes.io/instance-type": "local"}}},
        {
            "metadata": {"name": "a3-mega"},
            "spec": {"nodeLabels": {"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"}},
        },
        {
            "metadata": {"name": "a3-ultra"},
            "spec": {"nodeLabels": {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}},
        },
    ]
