"""Where pods may run: node affinity, tolerations and topology.

Affinity and tolerations stand in the pod template although Kueue's flavors name them too: with tolerations in the
flavor alone, Kueue 0.17 admits a job and then evicts it in a loop, because it takes the taint for a failing node.
"""

from __future__ import annotations

from typing import Any

from spec.facts import Site
from spec.machines import Machine

ACCELERATOR = "cloud.google.com/gke-accelerator"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
GPU_RESOURCE = "nvidia.com/gpu"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
UNCONSTRAINED_TOPOLOGY = "kueue.x-k8s.io/podset-unconstrained-topology"
GPU_TOLERATIONS: tuple[dict[str, str], ...] = (
    {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"},
    # The node is about to be taken back: pods that are there finish their checkpoint instead of being thrown out.
    {"key": "cloud.google.com/impending-node-termination", "operator": "Exists", "effect": "NoSchedule"},
)


def on_gpus(accelerator: str) -> dict[str, Any]:
    """Only nodes with this accelerator. Never left to the resource request alone: it would take any GPU type."""
    return _node_affinity({"key": ACCELERATOR, "operator": "In", "values": [accelerator]})


def off_gpus() -> dict[str, Any]:
    """No node with GPUs: pods without GPUs would take cores and memory that GPU pods were counted for."""
    return _node_affinity({"key": ACCELERATOR, "operator": "DoesNotExist"})


def on_machine(row: Machine) -> dict[str, Any]:
    """Nodes of one CPU machine. A row that stands for any machine has no type of its own."""
    if row.oversubscribable:
        return off_gpus()
    return _node_affinity({"key": INSTANCE_TYPE, "operator": "In", "values": [row.machine_type]})


def topology(site: Site, *, together: bool) -> dict[str, str]:
    """Annotations of a GPU pod set: its nodes close to each other if they fit so, or anywhere.

    Without either, Kueue offers a pod set no flavor that has a topology: the job would never be admitted.
    """
    if not site.topology_level:
        return {}
    if together:
        return {PREFERRED_TOPOLOGY: site.topology_level}
    return {UNCONSTRAINED_TOPOLOGY: "true"}


def _node_affinity(expression: dict[str, Any]) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
