"""Plain Kubernetes objects -> resources of the engine.

Every object of ours goes through `declare`, which keeps the rules of all: a logical name that is the object's own, the
component as parent, the cluster's one provider, and for custom resources the right to take fields back from whoever
wrote them, except those that a controller owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes

Objects = list[dict[str, Any]]

PATCH_FORCE = "pulumi.com/patchForce"
"""Annotation: server-side apply takes fields over from other managers instead of failing."""
SKIP_AWAIT = "pulumi.com/skipAwait"
"""Annotation: the engine does not wait for the object to be ready."""
TIMEOUT_SECONDS = "pulumi.com/timeoutSeconds"

_CORE = frozenset(
    {
        "v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1",
        "apiextensions.k8s.io/v1", "admissionregistration.k8s.io/v1", "apiregistration.k8s.io/v1",
        "scheduling.k8s.io/v1", "flowcontrol.apiserver.k8s.io/v1",
    }
)  # fmt: skip
"""API versions of the API server itself."""
WRITTEN_BY_OTHERS: Mapping[str, tuple[str, ...]] = {
    "RayCluster": ("spec.suspend", "spec.workerGroupSpecs[*].replicas"),
}
"""Kind to fields that a controller (Kueue, an autoscaler) sets after us; they are ours at creation only."""


def token(api_version: str, kind: str) -> str:
    """The engine's type of an object."""
    return f"kubernetes:{'core/v1' if api_version == 'v1' else api_version}:{kind}"


def is_custom(one: Mapping[str, Any]) -> bool:
    """Whether a controller of somebody, rather than the API server, gives it its meaning."""
    return one["apiVersion"] not in _CORE


def logical_name(one: Mapping[str, Any]) -> str:
    """Name of the resource under its component: the object's own, with its namespace."""
    metadata = one["metadata"]
    return "-".join(part for part in (metadata.get("namespace", ""), metadata["name"]) if part)


def annotated(one: dict[str, Any], **annotations: str) -> dict[str, Any]:
    """The object with more annotations, whose slashes and dots are given as they are through `**{...}`."""
    metadata = one["metadata"]
    return {**one, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}}


def declare(
    objects: Sequence[dict[str, Any]],
    *,
    parent: pulumi.Resource,
    provider: kubernetes.Provider,
    depends_on: Sequence[pulumi.Resource] = (),
    options: pulumi.ResourceOptions | None = None,
) -> list[pulumi.Resource]:
    """One resource for each object, in the order given. Values may be outputs; kinds and names may not."""
    found: list[pulumi.Resource] = []
    for one in objects:
        whole = annotated(one, **{PATCH_FORCE: "true"}) if is_custom(one) else one
        own = pulumi.ResourceOptions(
            parent=parent,
            provider=provider,
            depends_on=list(depends_on),
            ignore_changes=list(WRITTEN_BY_OTHERS.get(one["kind"], ())),
        )
        resource_type = token(one["apiVersion"], one["kind"])
        merged = pulumi.ResourceOptions.merge(own, options)
        found.append(_Object(resource_type, logical_name(one), whole, merged))
    return found


class _Object(pulumi.CustomResource):
    """Any object; the engine knows its type by the token alone."""

    def __init__(self, kind: str, name: str, properties: Mapping[str, Any], options: pulumi.ResourceOptions) -> None:
        super().__init__(kind, name, dict(properties), options)
