"""How pods of other regions reach the syncer of an experiment in this cluster.

The region stack reserves an address and opens the network for its two ports; here an internal load balancer brings what
arrives at it to the one syncer that learners of other clusters use (`manifests.labels.OUTER`). Only ranges of the other
regions' pods are let in. The Service is there before any syncer: it belongs to the cluster, not to a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_kubernetes as kubernetes

from infra.components.k8s.objects import SKIP_AWAIT, Objects, declare
from infra.facts import RegionSyncer
from manifests import labels, names
from manifests.labels import OUTER

NAME = "syncer"
_INTERNAL = "networking.gke.io/load-balancer-type"
_ALL_REGIONS = "networking.gke.io/internal-load-balancer-allow-global-access"


def access_objects(syncer: RegionSyncer | None, *, namespace: str) -> Objects:
    """The Service; none where no other region comes in or where the address is somebody else's to route."""
    if syncer is None or not syncer.reserved or not syncer.host or not syncer.peers:
        return []
    ports = (("bulk", syncer.bulk_port), ("control", syncer.control_port))
    annotations = {
        _INTERNAL: "Internal",
        _ALL_REGIONS: "true",
        SKIP_AWAIT: "true",  # without a syncer it has no endpoints
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"annotations": annotations, "name": NAME, "namespace": namespace},
            "spec": {
                # Local: the sender's address stays, and with it what the ranges below mean.
                "externalTrafficPolicy": "Local",
                "loadBalancerIP": syncer.host,
                "loadBalancerSourceRanges": sorted(syncer.peers),
                "ports": [{"name": name, "port": port, "protocol": "TCP", "targetPort": port} for name, port in ports],
                "selector": {labels.ROLE: names.SYNCER, **OUTER},
                "type": "LoadBalancer",
            },
        }
    ]


@dataclass(frozen=True, kw_only=True)
class SyncerAccessArgs:
    """Syncers of a cluster."""

    provider: kubernetes.Provider
    syncer: RegionSyncer | None
    namespace: str
    """Of syncers: the first of the experiments' namespaces."""


class SyncerAccess(pulumi.ComponentResource):
    """Declares it."""

    def __init__(self, name: str, args: SyncerAccessArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:SyncerAccess", name, None, opts)
        objects = access_objects(args.syncer, namespace=args.namespace)
        declare(objects, parent=self, provider=args.provider)
        self.register_outputs({"open": bool(objects)})
