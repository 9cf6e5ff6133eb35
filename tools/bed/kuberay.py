"""KubeRay's operator, from its own kustomize configuration, in a namespace of its own, watching all namespaces."""

from __future__ import annotations

import copy
from typing import Any

from tools.bed.rendered import Objects, only, render

NAMESPACE = "kuberay-system"
NAME = "kuberay-operator"
MODULE = "github.com/ray-project/kuberay/ray-operator"


def objects(image: str) -> Objects:
    """The operator and its four resource types; the types come first. 4 MB: apply server-side."""
    return adapt(render("kuberay", module=MODULE, folder="config/default"), image=image)


def adapt(upstream: Objects, *, image: str) -> Objects:
    """Upstream's objects in our namespace, small enough for one machine and quick to say that they are ready."""
    result = copy.deepcopy(upstream)
    for one in result:
        if one["kind"] == "CustomResourceDefinition":
            # Older versions are half a megabyte that nothing here asks for and the API server takes seconds over.
            one["spec"]["versions"] = [version for version in one["spec"]["versions"] if version["storage"]]
        if "namespace" in one["metadata"]:
            one["metadata"]["namespace"] = NAMESPACE
        for subject in one.get("subjects", ()):
            subject["namespace"] = NAMESPACE
    _adapt_deployment(only(result, kind="Deployment", name=NAME), image=image)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    return [namespace, *result]


def _adapt_deployment(deployment: dict[str, Any], *, image: str) -> None:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["image"] = image
    container["imagePullPolicy"] = "Never"
    # Upstream's limit of 0.1 CPU throttles the operator to seconds per reconcile.
    container["resources"] = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
    container["readinessProbe"] |= {"initialDelaySeconds": 0, "periodSeconds": 1, "failureThreshold": 60}
    # Two GPU groups of one job come up side by side; upstream's default handles one object at a time.
    container["args"] = [*container.get("args", ()), "--reconcile-concurrency=4"]
