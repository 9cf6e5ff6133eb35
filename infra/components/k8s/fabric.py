"""Network objects: how pods name the networks of their node's GPU NICs.

A pair for each network, in the order of the node pool: parameters (which VPC and subnet) and the Network that pod
annotations refer to. Without them installers look healthy and NCCL falls back to TCP, so what runs on GPUs waits for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_kubernetes as kubernetes

from infra.components.k8s.objects import Objects, declare
from infra.facts import AttachedNetwork, RegionFabric
from spec.errors import ConfigError
from spec.machines import machine
from spec.stack_fabric import FabricNetwork, network_faults

API = "networking.gke.io/v1"


def network_objects(fabrics: Sequence[RegionFabric]) -> Objects:
    """Both objects of every network; a network that two machine types share is declared once."""
    known: dict[str, AttachedNetwork] = {}
    found: Objects = []
    for fabric in fabrics:
        _check(fabric)
        for one in fabric.networks:
            before = known.setdefault(one.name, one)
            if before != one:
                raise ConfigError(
                    f"network {one.name} of {fabric.machine} is subnet {one.subnetwork}, another machine's is "
                    f"{before.subnetwork}; pods name networks without the machine",
                    hint="one machine type of a fabric per cluster: put the other into a region stack of its own",
                )
            if before is one:
                found += _pair(one)
    return found


def _check(fabric: RegionFabric) -> None:
    row = machine(fabric.machine)
    if not fabric.networks:  # GKE's managed DRANET
        return
    given = [FabricNetwork(one.name, one.mode, own_vpc=True) for one in fabric.networks]
    if faults := network_faults(row, networks=given):
        raise ConfigError("; ".join(faults), hint="bring the region stack up with this version of the repository")


def _pair(one: AttachedNetwork) -> Objects:
    parameters = {"group": "networking.gke.io", "kind": "GKENetworkParamSet", "name": one.name}
    return [
        {
            "apiVersion": API,
            "kind": "GKENetworkParamSet",
            "metadata": {"name": one.name},
            "spec": {"deviceMode": one.mode, "vpc": one.network, "vpcSubnet": one.subnetwork},
        },
        {
            "apiVersion": API,
            "kind": "Network",
            "metadata": {"name": one.name},
            "spec": {"parametersRef": parameters, "type": "Device"},
        },
    ]


@dataclass(frozen=True, kw_only=True)
class FabricObjectsArgs:
    """Networks of a cluster."""

    provider: kubernetes.Provider
    fabrics: Sequence[RegionFabric]


class FabricObjects(pulumi.ComponentResource):
    """Declares them."""

    def __init__(self, name: str, args: FabricObjectsArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:FabricObjects", name, None, opts)
        objects = network_objects(args.fabrics)
        declare(objects, parent=self, provider=args.provider)
        self.networks = [one["metadata"]["name"] for one in objects if one["kind"] == "Network"]
        self.register_outputs({"networks": self.networks})
