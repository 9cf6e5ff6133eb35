"""Namespaces of a cluster, what every pod in them needs (its account and the Secrets it refers to), and who may launch.

The account has no right in the cluster; its name alone is what the region's bucket knows it by (workload identity).
Values of Secrets come from the stack's secret configuration and stay secret in the state; a Secret that is referred to
and not configured is somebody else's to make, and pods wait for it.

Experiments' namespaces come after the operators and go before them: what is left in them goes with them, and a RayJob
or a Workload goes only while the operator that put a finalizer on it still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes

from infra.components.k8s.objects import Objects, declare
from infra.components.k8s.rights import rights_objects
from infra.facts import NAMESPACE
from manifests.labels import EXPERIMENTS
from manifests.names import METRICS_PORT
from spec.facts import Site

COLLECTOR_NAMESPACE = "gmp-system"
"""Where Google's managed collection runs."""
RAY_METRICS_PORT = 8080
RAY_PODS = {"ray.io/is-ray-node": "yes"}
"""Labels that KubeRay gives every pod of a Ray cluster."""
SecretValues = Mapping[str, Mapping[str, pulumi.Input[str]]]
"""Secret to its keys and values."""


def namespace_objects(names: Sequence[str]) -> Objects:
    """The namespaces: the platform's own, or some of experiments."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": {} if name == NAMESPACE else dict(EXPERIMENTS)},
        }
        for name in names
    ]


def content_objects(names: Sequence[str], *, site: Site, secrets: SecretValues) -> Objects:
    """What is in each of them."""
    found: Objects = []
    for namespace in names:
        if site.service_account:
            found.append(_account(namespace, site=site))
        found += [_secret(namespace, name, values) for name, values in sorted(secrets.items())]
        found += [_metrics(namespace)] if namespace == NAMESPACE else [_closed(namespace), _metrics(namespace)]
    return found


def referred_secrets(site: Site) -> list[str]:
    """Secrets that pods of experiments refer to."""
    return [name for name in (site.bucket_secret, *site.image_pull_secrets) if name]


def _account(namespace: str, *, site: Site) -> dict[str, Any]:
    found: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": site.service_account, "namespace": namespace},
        "automountServiceAccountToken": False,
    }
    if site.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in site.image_pull_secrets]
    return found


def _secret(namespace: str, name: str, values: Mapping[str, pulumi.Input[str]]) -> dict[str, Any]:
    kind = "kubernetes.io/dockerconfigjson" if ".dockerconfigjson" in values else "Opaque"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": {key: pulumi.Output.secret(value) for key, value in values.items()},
        "type": kind,
    }


def _closed(namespace: str) -> dict[str, Any]:
    """Nothing reaches a pod that its run's own policy does not name."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "closed", "namespace": namespace},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }


def _metrics(namespace: str) -> dict[str, Any]:
    """Managed collection scrapes Ray's metrics, and those of service replicas."""
    collectors = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": COLLECTOR_NAMESPACE}}}
    ports = [{"port": port, "protocol": "TCP"} for port in (RAY_METRICS_PORT, METRICS_PORT)]
    rule = {"from": [collectors], "ports": ports}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "metrics", "namespace": namespace},
        "spec": {
            "ingress": [rule],
            "podSelector": {"matchLabels": dict(RAY_PODS)},
            "policyTypes": ["Ingress"],
        },
    }


@dataclass(frozen=True, kw_only=True)
class NamespacesArgs:
    """Namespaces of a cluster: the platform's own, or those of experiments."""

    provider: kubernetes.Provider
    names: Sequence[str]
    site: Site
    secrets: SecretValues = field(default_factory=dict[str, Mapping[str, pulumi.Input[str]]])
    researchers: Sequence[str] = ()
    """Who may launch there; nobody in the platform's own."""
    after: Sequence[pulumi.Resource] = ()
    """What must outlive them: the operators whose objects are in them."""


class Namespaces(pulumi.ComponentResource):
    """Declares them."""

    def __init__(self, name: str, args: NamespacesArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:Namespaces", name, None, opts)
        spaces = declare(namespace_objects(args.names), parent=self, provider=args.provider, depends_on=args.after)
        content = content_objects(args.names, site=args.site, secrets=args.secrets)
        content += rights_objects(args.names, researchers=args.researchers)
        declare(content, parent=self, provider=args.provider, depends_on=spaces)
        self.register_outputs({"names": list(args.names)})
