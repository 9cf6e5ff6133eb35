"""KubeRay's operator, watching all namespaces from one of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes

from infra.components.k8s.operators import Operator, Source, image_values, install
from manifests import values
from manifests.names import OPERATOR_NAMESPACE
from spec.stack_platform import KubeRay

NAME = "kuberay-operator"
CONCURRENCY = 4
"""Jobs that it works on at once; upstream's default is one after the other."""
MOST_CORES = 4.0


def operator(kuberay: KubeRay) -> Operator:
    """What it is given. Upstream's limit of a tenth of a core would stretch each look at a cluster to seconds."""
    memory = {"memory": values.memory(kuberay.memory)}
    # A value cannot take the chart's own limit away, only replace it.
    limits = {"cpu": values.cpu(max(MOST_CORES, kuberay.cpu)), **memory}
    resources = {"limits": limits, "requests": {"cpu": values.cpu(kuberay.cpu), **memory}}
    settings: dict[str, Any] = {
        "fullnameOverride": NAME,
        "nameOverride": NAME,
        "reconcileConcurrency": CONCURRENCY,
        "resources": resources,
    }
    if image := image_values(kuberay.image):
        settings["image"] = image
    return Operator(
        name=NAME, namespace=OPERATOR_NAMESPACE, deployment=NAME, values=settings, image=kuberay.image,
        resources=resources,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KubeRayStackArgs:
    """The operator of a cluster."""

    provider: kubernetes.Provider
    kuberay: KubeRay
    source: Source


class KubeRayStack(pulumi.ComponentResource):
    """Declares it, resource types included. `ready`: what Ray clusters of this stack wait for."""

    def __init__(self, name: str, args: KubeRayStackArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:KubeRayStack", name, None, opts)
        self.ready = install(operator(args.kuberay), source=args.source, parent=self, provider=args.provider)
        self.register_outputs({"version": args.source.version})
