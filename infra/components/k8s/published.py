"""The facts in the cluster, where `gkr clusters add` reads them. Last of all: what they promise is there by then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_kubernetes as kubernetes

from infra.components.k8s.objects import declare
from infra.facts import config_map
from spec.facts import ClusterFacts


@dataclass(frozen=True, kw_only=True)
class FactsConfigMapArgs:
    """Facts of a cluster."""

    provider: kubernetes.Provider
    facts: ClusterFacts
    after: Sequence[pulumi.Resource]


class FactsConfigMap(pulumi.ComponentResource):
    """Declares the ConfigMap."""

    def __init__(self, name: str, args: FactsConfigMapArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:FactsConfigMap", name, None, opts)
        declare([config_map(args.facts)], parent=self, provider=args.provider, depends_on=args.after)
        self.register_outputs({"cluster": args.facts.name})
