"""Kueue's operator, and the queue `research` with what it may hand out.

One resource group covers CPU, memory and GPUs, because a pod set that asks for topology needs one flavor that has a
topology for all it asks. GPU flavors come first and carry their nodes' taint, so heads and services pass them by and
land on the real node. The other order would hide why a job waits: a head that fits the first flavor makes Kueue try
the rest for it in the next round, and what is then reported is that no GPU flavor suits a head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from manifests.values import canonical
from spec.errors import GkrError
from spec.machines import Machine, machine
from tools.bed.rendered import Objects, only, render

NAMESPACE = "kueue-system"
NAME = "kueue-controller-manager"
MODULE = "sigs.k8s.io/kueue"
API = "kueue.x-k8s.io/v1beta2"
QUEUE = "research"
TOPOLOGY = "gke-default"
TOPOLOGY_LEVELS = (
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "cloud.google.com/gce-topology-host",
    "kubernetes.io/hostname",
)
GPU = "nvidia.com/gpu"
GPU_TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}
"""What GKE puts on nodes with GPUs."""
RESOURCES = ("cpu", "memory", GPU, "ephemeral-storage")
PRIORITIES = {"low": -100, "normal": 0, "high": 100}
FRAMEWORKS = ("batch/job", "ray.io/rayjob", "ray.io/raycluster")
_WEBHOOK_GROUPS = {"kueue.x-k8s.io", "ray.io", "batch"}
_WEBHOOKS_OF_OTHERS = {"rayservices"}
CONFIG_KEY = "controller_manager_config.yaml"


def objects(image: str) -> Objects:
    """The operator: upstream's default configuration, adapted."""
    return adapt(render("kueue", module=MODULE, folder="config/default"), image=image)


def adapt(upstream: Objects, *, image: str) -> Objects:
    """Upstream's objects for one small machine, and only for the frameworks that this project uses.

    Webhooks of other kinds go: each would stand in the way of every pod and deployment until Kueue answers.
    """
    result = [one if one["kind"] == "CustomResourceDefinition" else copy.deepcopy(one) for one in upstream]
    for one in result:
        if one["kind"].endswith("WebhookConfiguration"):
            one["webhooks"] = [hook for hook in one["webhooks"] if _is_ours(hook)]
    settings = only(result, kind="ConfigMap", name="kueue-manager-config")["data"]
    settings[CONFIG_KEY] = _configuration(settings[CONFIG_KEY])
    _adapt_deployment(only(result, kind="Deployment", name=NAME), image=image)
    return result


def _is_ours(hook: Mapping[str, Any]) -> bool:
    groups = {group for rule in hook["rules"] for group in rule["apiGroups"]}
    resources = {resource for rule in hook["rules"] for resource in rule["resources"]}
    return groups <= _WEBHOOK_GROUPS and not resources & _WEBHOOKS_OF_OTHERS


def _configuration(upstream: str) -> str:
    settings = yaml.safe_load(upstream)
    settings["leaderElection"]["leaderElect"] = False  # one replica: waiting for a lease costs seconds
    settings["integrations"]["frameworks"] = list(FRAMEWORKS)
    settings["clientConnection"] = {"qps": 200, "burst": 400}
    return yaml.safe_dump(settings, sort_keys=True)


def _adapt_deployment(deployment: dict[str, Any], *, image: str) -> None:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["image"] = image
    container["imagePullPolicy"] = "Never"
    container["resources"] = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    container["readinessProbe"] |= {"initialDelaySeconds": 0, "periodSeconds": 1, "failureThreshold": 60}
    deployment["spec"]["strategy"] = {"type": "Recreate"}


def queues(
    nodes: Mapping[str, int], *, real: Mapping[str, str], namespaces: Iterable[str], selector: Mapping[str, str]
) -> Objects:
    """Topology, flavors, queue and priorities; apply once Kueue's webhooks answer.

    `nodes`: catalogue machine -> GPU nodes of it; `real`: what pods may ask of the real node in all, by resource;
    `selector`: labels of namespaces that may use the queue.
    """
    machines = [machine(name) for name in nodes]
    quotas = [(one.name, _quota(one, nodes[one.name])) for one in machines if one.gpus]
    quotas += [("cpu", {**dict.fromkeys(RESOURCES, "0"), **real})]
    quotas += [(one.name, _quota(one, nodes[one.name])) for one in machines if not one.gpus]
    return [
        {
            "apiVersion": API,
            "kind": "Topology",
            "metadata": {"name": TOPOLOGY},
            "spec": {"levels": [{"nodeLabel": label} for label in TOPOLOGY_LEVELS]},
        },
        *(_flavor(one) for one in machines),
        {
            "apiVersion": API,
            "kind": "ResourceFlavor",
            "metadata": {"name": "cpu"},
            "spec": {"nodeLabels": machine("local-cpu").labels},
        },
        *(_priority(name, value) for name, value in PRIORITIES.items()),
        _cluster_queue(quotas, selector=selector),
        *(_local_queue(namespace) for namespace in namespaces),
    ]


def _quota(one: Machine, nodes: int) -> dict[str, str]:
    return {name: canonical(int(value) * nodes) for name, value in capacity(one).items()}


def capacity(one: Machine) -> dict[str, str]:
    """What one node of a catalogue machine offers to pods, in whole units (cores, bytes, GPUs)."""
    if one.allocatable_cpu < 1:
        raise GkrError(f"{one.name} has no size in the machine catalogue, so it cannot be a fake node")
    values = {"cpu": int(one.allocatable_cpu), "memory": one.allocatable_memory, "ephemeral-storage": _storage(one)}
    return {name: str(value) for name, value in (values | {GPU: one.gpus}).items()}


def _storage(one: Machine) -> int:
    """Local SSDs hold what pods write; a machine without has its boot disk of 100 GiB."""
    return (one.local_ssds * 375 or 100) * 2**30


def _flavor(one: Machine) -> dict[str, Any]:
    # Tolerations are in the pod template: with them only here, Kueue 0.17 admits and then evicts in a loop.
    spec: dict[str, Any] = {"nodeLabels": {"node.kubernetes.io/instance-type": one.machine_type}}
    if one.gpus:
        label = "cloud.google.com/gke-accelerator"
        spec = {"nodeLabels": {label: one.accelerator}, "nodeTaints": [GPU_TAINT], "topologyName": TOPOLOGY}
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": one.name}, "spec": spec}


def _priority(name: str, value: int) -> dict[str, Any]:
    return {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}


def _cluster_queue(quotas: list[tuple[str, dict[str, str]]], *, selector: Mapping[str, str]) -> dict[str, Any]:
    flavors = [
        {"name": name, "resources": [{"name": resource, "nominalQuota": quota[resource]} for resource in RESOURCES]}
        for name, quota in quotas
    ]
    return {
        "apiVersion": API,
        "kind": "ClusterQueue",
        "metadata": {"name": QUEUE},
        "spec": {
            "namespaceSelector": {"matchLabels": dict(selector)},
            "resourceGroups": [{"coveredResources": list(RESOURCES), "flavors": flavors}],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        },
    }


def _local_queue(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "LocalQueue",
        "metadata": {"name": QUEUE, "namespace": namespace},
        "spec": {"clusterQueue": QUEUE},
    }
