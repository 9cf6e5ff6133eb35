"""The kinds of object that gkr handles, as lightkube's generic resources: plain dictionaries, nothing dropped.

The typed models would lose fields that are newer than they are, and importing them costs more than a request.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

ALL = "*"
"""Of a list: every namespace."""


class Kind(NamedTuple):
    """Where the server keeps objects of a kind."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_BATCH, _RAY, _KUEUE = "batch", "ray.io", "kueue.x-k8s.io"

KINDS: dict[str, Kind] = {
    "ConfigMap": Kind("", "v1", "configmaps"),
    "Event": Kind("", "v1", "events"),
    "Namespace": Kind("", "v1", "namespaces", namespaced=False),
    "Node": Kind("", "v1", "nodes", namespaced=False),
    "PersistentVolumeClaim": Kind("", "v1", "persistentvolumeclaims"),
    "Pod": Kind("", "v1", "pods"),
    "Secret": Kind("", "v1", "secrets"),
    "Service": Kind("", "v1", "services"),
    "ServiceAccount": Kind("", "v1", "serviceaccounts"),
    "Job": Kind(_BATCH, "v1", "jobs"),
    "NetworkPolicy": Kind("networking.k8s.io", "v1", "networkpolicies"),
    "PodDisruptionBudget": Kind("policy", "v1", "poddisruptionbudgets"),
    "Role": Kind("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "PriorityClass": Kind("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False),
    "CustomResourceDefinition": Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False),
    "SelfSubjectAccessReview": Kind("authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False),
    "RayJob": Kind(_RAY, "v1", "rayjobs"),
    "RayCluster": Kind(_RAY, "v1", "rayclusters"),
    "Workload": Kind(_KUEUE, "v1beta2", "workloads"),
    "LocalQueue": Kind(_KUEUE, "v1beta2", "localqueues"),
    "ClusterQueue": Kind(_KUEUE, "v1beta2", "clusterqueues", namespaced=False),
    "ResourceFlavor": Kind(_KUEUE, "v1beta2", "resourceflavors", namespaced=False),
    "Topology": Kind(_KUEUE, "v1beta2", "topologies", namespaced=False),
    "WorkloadPriorityClass": Kind(_KUEUE, "v1beta2", "workloadpriorityclasses", namespaced=False),
}


@cache
def resource(kind: str) -> Any:
    """lightkube's class for a kind; not registered, so that the typed classes stay usable beside it."""
    from lightkube import generic_resource as generic

    place = KINDS[kind]
    base = generic.GenericNamespacedResource if place.namespaced else generic.GenericGlobalResource
    made: Any = generic.create_api_info  # type: ignore[reportUnknownMemberType]
    info = made(place.group, place.version, kind, place.plural)
    return type(kind, (base,), {"_api_info": info})


def instance(obj: dict[str, Any]) -> Any:
    """An object as lightkube wants it."""
    return resource(obj["kind"])(obj)
