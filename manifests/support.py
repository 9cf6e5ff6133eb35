"""What stands beside a job: its files, its account, who may reach it, and who may not evict it."""

from __future__ import annotations

from typing import Any

from manifests import labels, names, pods, scripts
from spec.plan import LearnerPlan, Plan


def metadata(plan: Plan, name: str, *, namespace: str, learner: LearnerPlan | None = None) -> dict[str, Any]:
    """Metadata of an object that is not a pod."""
    return {
        "annotations": labels.plan_annotations(plan),
        "labels": labels.labels(plan, learner=learner),
        "name": name,
        "namespace": namespace,
    }


def learner_config_map(plan: Plan, learner: LearnerPlan) -> dict[str, Any]:
    """Files of /gkr/plan. A person's command is a file too: a command line would be quoted and expanded on its way."""
    data = {"driver.sh": scripts.DRIVER, "plan.json": labels.plan_json(plan), "start.sh": scripts.START}
    if plan.run_script is not None:
        data["run.sh"] = plan.run_script
    return config_map(metadata(plan, learner.job, namespace=learner.namespace, learner=learner), data)


def config_map(own: dict[str, Any], data: dict[str, str]) -> dict[str, Any]:
    """Immutable: a plan never changes under a run, and kubelets need not watch it."""
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": own, "immutable": True, "data": dict(sorted(data.items())),
    }  # fmt: skip


def service_account(own: dict[str, Any]) -> dict[str, Any]:
    """An account without any right: nothing in a pod talks to the API server."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": own, "automountServiceAccountToken": False}


def learner_network_policy(plan: Plan, learner: LearnerPlan) -> dict[str, Any]:
    """Into a learner's pods: the learner's own pods, and KubeRay's operator to the head's dashboard port.

    Egress is open: buckets, shared services and the syncer are outside.
    """
    own = labels.selector(plan, learner=learner)
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": names.OPERATOR_NAMESPACE}}}
    ingress = [
        {"from": [{"podSelector": {"matchLabels": own}}]},
        {"from": [operator], "ports": [{"port": names.DASHBOARD_PORT, "protocol": "TCP"}]},
    ]
    return network_policy(
        metadata(plan, learner.job, namespace=learner.namespace, learner=learner), selector=own, ingress=ingress
    )


def network_policy(own: dict[str, Any], *, selector: dict[str, str], ingress: list[dict[str, Any]]) -> dict[str, Any]:
    """A policy for incoming traffic only."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": own,
        "spec": {"ingress": ingress, "podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"]},
    }


def disruption_budget(plan: Plan, learner: LearnerPlan) -> dict[str, Any]:
    """No pod of a learner is evicted for convenience (a drain, an upgrade): one that goes stops all others.

    All of them by number, because `maxUnavailable` counts replicas through a scale subresource, which a RayCluster does
    not have. A pod that is not ready protects nothing and may go.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(plan, learner.job, namespace=learner.namespace, learner=learner),
        "spec": {
            "minAvailable": pods.pod_count(learner),
            "selector": {"matchLabels": labels.selector(plan, learner=learner)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
