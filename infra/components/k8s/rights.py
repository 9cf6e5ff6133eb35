"""What researchers may do in a cluster: everything in the namespaces of experiments, nothing elsewhere but look.

Looking is the role that the global stack grants on the project; it lets nobody launch. Who is a researcher is said
once, in the global stack, and reaches every cluster through its region's facts. Groups are resolved by the cluster's
security group (`infra.components.gcp.cluster`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infra.components.k8s.objects import Objects

NAME = "gkr-researchers"
_GROUP = "rbac.authorization.k8s.io"
_LOOK = ["get", "list", "watch"]
_ALL = [*_LOOK, "create", "delete", "patch", "update"]
RULES: tuple[dict[str, Any], ...] = (
    {"apiGroups": ["ray.io"], "resources": ["rayclusters", "rayjobs"], "verbs": _ALL},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": _ALL},
    {
        "apiGroups": [""],
        "resources": ["configmaps", "persistentvolumeclaims", "pods", "serviceaccounts", "services"],
        "verbs": _ALL,
    },
    # By name only: a list would show every other person's keys at once.
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create", "delete", "patch", "update"]},
    {"apiGroups": [""], "resources": ["pods/exec", "pods/portforward"], "verbs": ["get", "create"]},
    {"apiGroups": [""], "resources": ["events", "pods/log"], "verbs": _LOOK},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": _LOOK},
    {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": _ALL},
    {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": _ALL},
    {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues", "workloads"], "verbs": _LOOK},
)
"""What `gkr` does for a person: it renders these kinds, applies and deletes them, reads logs and runs commands."""
LOOKS: tuple[dict[str, Any], ...] = (
    {
        "apiGroups": ["kueue.x-k8s.io"],
        "resources": [
            "clusterqueues", "cohorts", "localqueues", "resourceflavors", "topologies", "workloadpriorityclasses",
            "workloads",
        ],
        "verbs": _LOOK,
    },
    {"apiGroups": ["visibility.kueue.x-k8s.io"], "resources": ["clusterqueues/pendingworkloads"], "verbs": ["get"]},
)  # fmt: skip
"""What queues belong to in the whole cluster, and who waits before one; the project's role need not know these kinds.
"""


def rights_objects(namespaces: Sequence[str], *, researchers: Sequence[str]) -> Objects:
    """Roles and who has them, in the cluster and in each namespace of experiments; nothing where there is nobody."""
    if not researchers:
        return []
    subjects = [_subject(member) for member in researchers]
    found = _given("ClusterRole", {"name": NAME}, LOOKS, subjects)
    for namespace in namespaces:
        found += _given("Role", {"name": NAME, "namespace": namespace}, RULES, subjects)
    return found


def _given(
    kind: str, metadata: dict[str, str], rules: Sequence[dict[str, Any]], subjects: list[dict[str, str]]
) -> Objects:
    version = f"{_GROUP}/v1"
    role = {"apiVersion": version, "kind": kind, "metadata": metadata, "rules": [dict(one) for one in rules]}
    binding = {
        "apiVersion": version,
        "kind": f"{kind}Binding",
        "metadata": metadata,
        "roleRef": {"apiGroup": _GROUP, "kind": kind, "name": NAME},
        "subjects": subjects,
    }
    return [role, binding]


def _subject(member: str) -> dict[str, str]:
    """A member as the cluster sees it: persons and accounts by mail address, federated ones by their full name."""
    kind, _, name = member.partition(":")
    if kind in ("principal", "principalSet"):
        name = member
    return {"apiGroup": _GROUP, "kind": "Group" if kind in ("group", "principalSet") else "User", "name": name}
