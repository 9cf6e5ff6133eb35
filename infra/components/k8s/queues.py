"""Kueue's queues over the pools of a cluster: flavors, quotas, cohorts, priorities. Pure.

Rules learned from Kueue 0.17 on real clusters:

- Flavors of GPU machines come first and carry their nodes' taint, so that heads and services pass them by. In the other
  order a waiting job is reported with the flavors that its head did not fit, not with what it lacks.
- Tolerations are in the pod templates, not here: with them only in the flavor a job is admitted and evicted in a loop.
- One resource group covers all that pods ask for; an undeclared resource would keep every job out.

Machines of a queued pool come only when somebody asks for all nodes of a job at once: an admission check makes Kueue
ask, and admits the job when they are there. Without it the job would be admitted at once and its pods wait for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from infra.components.k8s.objects import Objects
from infra.facts import RegionFacts
from manifests import values
from manifests.labels import EXPERIMENTS
from manifests.placing import ACCELERATOR, GPU_RESOURCE, INSTANCE_TYPE
from spec.errors import ConfigError
from spec.facts import MachinePool
from spec.machines import Machine
from spec.problems import did_you_mean
from spec.stack_platform import Kueue, Queue

API = "kueue.x-k8s.io/v1beta2"
TOPOLOGY = "gke-default"
GPU_TAINT = {"key": GPU_RESOURCE, "value": "present", "effect": "NoSchedule"}
"""What GKE puts on nodes with GPUs."""
QUEUED_TAINT = {"key": "cloud.google.com/gke-queued", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
"""What GKE puts on nodes of a queued pool, as pods tolerate it."""
PROVISIONING = "queued-provisioning.gke.io"
"""Class of requests for such nodes."""
RESOURCES = ("cpu", "memory", GPU_RESOURCE, "ephemeral-storage")
POOL_LABEL = "cloud.google.com/gke-nodepool"
LOCAL_SSD_GIB = 375
BOOT_DISK_GIB = 100

Holdings = Mapping[str, Mapping[str, float]]
"""GPU type (empty: without) to what the platform itself holds of each resource."""


def queue_objects(kueue: Kueue, *, region: RegionFacts, holdings: Holdings) -> Objects:
    """Everything that Kueue is told about the cluster, in the order in which it must be there."""
    pools = queued_pools(kueue, region=region)
    topology = kueue.topology and any(pool.row.gpus for pool in pools)
    cohorts = dict.fromkeys(queue.cohort for queue in kueue.queues if queue.cohort)
    return [
        *([_topology(kueue)] if topology else []),
        *(one for pool in pools if pool.name in region.queued for one in _provisioning(pool, region=region)),
        *(_flavor(pool, region=region, topology=topology) for pool in pools),
        *(_priority(name, value) for name, value in kueue.priorities.items()),
        *({"apiVersion": API, "kind": "Cohort", "metadata": {"name": name}, "spec": {}} for name in cohorts),
        *(_cluster_queues(kueue, pools=pools, holdings=holdings, queued=region.queued)),
    ]


def local_queues(kueue: Kueue, *, namespaces: Sequence[str]) -> Objects:
    """The way into the queues from each namespace of experiments."""
    return [_local_queue(queue.name, namespace) for namespace in namespaces for queue in kueue.queues]


def queued_pools(kueue: Kueue, *, region: RegionFacts) -> list[MachinePool]:
    """Pools that some queue hands out; those with GPUs first."""
    named = dict.fromkeys(name for queue in kueue.queues for name in (*queue.nodes, *queue.borrow_nodes))
    known = [pool.name for pool in region.pools]
    for name in named:
        if region.pool(name) is None:
            raise ConfigError(
                f"a queue hands out nodes of pool {name}, which {region.name} does not have",
                hint=did_you_mean(name, known, noun="pools") or f"its pools are {', '.join(known)}",
            )
    return sorted((pool for pool in region.pools if pool.name in named), key=lambda pool: not pool.row.gpus)


def _flavor(pool: MachinePool, *, region: RegionFacts, topology: bool) -> dict[str, Any]:
    """A pool's machines, as Kueue finds them. By the pool's own label only where two pools have one machine type."""
    row = pool.row
    labels = {ACCELERATOR: row.accelerator} if row.gpus else {INSTANCE_TYPE: row.machine_type}
    if sum(one.machine == pool.machine for one in region.pools) > 1:
        labels[POOL_LABEL] = pool.name
    spec: dict[str, Any] = {"nodeLabels": labels}
    if row.gpus:
        spec["nodeTaints"] = [dict(GPU_TAINT)]
        if topology:
            spec["topologyName"] = TOPOLOGY
    if pool.name in region.queued:
        spec["tolerations"] = [dict(QUEUED_TAINT)]
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": pool.name}, "spec": spec}


def _provisioning(pool: MachinePool, *, region: RegionFacts) -> Objects:
    """The check that a job of a queued pool waits for, and what it asks GKE for. Only pods with GPUs are asked for:
    heads run on machines that are there.
    """
    config = {"apiGroup": API.split("/")[0], "kind": "ProvisioningRequestConfig", "name": pool.name}
    return [
        {
            "apiVersion": API,
            "kind": "ProvisioningRequestConfig",
            "metadata": {"name": pool.name},
            "spec": {
                "managedResources": [GPU_RESOURCE],
                "parameters": {"maxRunDurationSeconds": str(region.queued[pool.name])},
                "provisioningClassName": PROVISIONING,
            },
        },
        {
            "apiVersion": API,
            "kind": "AdmissionCheck",
            "metadata": {"name": pool.name},
            "spec": {"controllerName": "kueue.x-k8s.io/provisioning-request", "parameters": config},
        },
    ]


def node_amounts(pool: MachinePool) -> dict[str, int]:
    """What one node of a pool offers to pods; cores in thousandths, the rest in whole units."""
    row = pool.row
    storage = (row.local_ssds * LOCAL_SSD_GIB or BOOT_DISK_GIB) * 2**30
    return {
        "cpu": round(pool.node_cpu * 1000),
        "memory": pool.node_memory,
        GPU_RESOURCE: row.gpus,
        "ephemeral-storage": storage,
    }


def shared_machine(row: Machine) -> bool:
    """Whether the pool's nodes are stand-ins that share one real machine: it is handed out once, not for each."""
    return row.oversubscribable


def _cluster_queues(
    kueue: Kueue, *, pools: Sequence[MachinePool], holdings: Holdings, queued: Collection[str]
) -> Objects:
    left = {gpu: dict(held) for gpu, held in holdings.items()}
    there = {pool.name: pool.nodes for pool in pools}
    return [_cluster_queue(queue, pools=pools, left=left, there=there, queued=queued) for queue in kueue.queues]


def _cluster_queue(
    queue: Queue,
    *,
    pools: Sequence[MachinePool],
    left: dict[str, dict[str, float]],
    there: dict[str, int],
    queued: Collection[str],
) -> dict[str, Any]:
    flavors = [
        {"name": pool.name, "resources": _quotas(queue, pool, left=left, there=there)}
        for pool in pools
        if pool.name in queue.nodes or pool.name in queue.borrow_nodes
    ]
    spec: dict[str, Any] = {
        "namespaceSelector": {"matchLabels": dict(EXPERIMENTS)},
        "preemption": {"withinClusterQueue": "LowerPriority" if queue.preempt_lower else "Never"},
        "resourceGroups": [{"coveredResources": list(RESOURCES), "flavors": flavors}],
    }
    checks = [{"name": one["name"], "onFlavors": [one["name"]]} for one in flavors if one["name"] in queued]
    if checks:
        spec["admissionChecksStrategy"] = {"admissionChecks": checks}
    if queue.cohort:
        spec["cohortName"] = queue.cohort
        # What it lent comes back to a queue when its own experiments ask for it.
        spec["preemption"]["reclaimWithinCohort"] = "Any"
    return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": queue.name}, "spec": spec}


def _quotas(
    queue: Queue, pool: MachinePool, *, left: dict[str, dict[str, float]], there: dict[str, int]
) -> list[dict[str, str]]:
    """Quota of each resource: the queue's nodes as far as the pool has them, less what the platform holds of such
    machines. A pool whose reservation has not been delivered has none yet, whatever a queue is promised.

    The first queue that hands out a machine type gives up the platform's share of it.
    """
    nodes = min(queue.nodes.get(pool.name, 0), there[pool.name])
    there[pool.name] -= nodes
    amounts = node_amounts(pool)
    count = min(nodes, 1) if shared_machine(pool.row) else nodes
    borrow = queue.borrow_nodes.get(pool.name)
    held = left.pop(pool.row.gpu or "", {}) if nodes else {}
    found: list[dict[str, str]] = []
    for name in RESOURCES:
        taken = round(held.get(name, 0.0) * (1000 if name == "cpu" else 1))
        total = amounts[name] * count
        if taken > total:
            raise ConfigError(
                f"shared services hold {_amount(name, taken)} {name} of {pool.row.name} machines, queue {queue.name} "
                f"hands out {_amount(name, total)} on pool {pool.name}",
                hint=f"fewer or smaller shared services, or more nodes of {pool.name} for queue {queue.name}",
            )
        one = {"name": name, "nominalQuota": _amount(name, total - taken)}
        if borrow is not None and queue.cohort:
            one["borrowingLimit"] = _amount(name, amounts[name] * borrow)
        found.append(one)
    return found


def _amount(resource: str, value: int) -> str:
    return values.canonical(value, thousandths=resource == "cpu")


def _topology(kueue: Kueue) -> dict[str, Any]:
    levels = [{"nodeLabel": label} for label in kueue.topology_levels]
    return {"apiVersion": API, "kind": "Topology", "metadata": {"name": TOPOLOGY}, "spec": {"levels": levels}}


def _priority(name: str, value: int) -> dict[str, Any]:
    return {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}


def _local_queue(name: str, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterQueue": name},
    }
