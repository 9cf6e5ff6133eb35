"""The networks between GPUs of one machine type in one cluster.

Which networks, their names and their order come from `spec.stack_fabric`: the order is that of the NICs, and another
one replaces every pool. Names are handed on as short names, the only form that compares equal in the provider. A RoCE
network is bound to a zone by its profile, takes no firewall rules (they are refused; everything
inside is admitted), and only RDMA NICs attach to it. Nothing peers with these networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulumi
from pulumi_gcp import compute

from infra.components.base import options
from spec.machines import Machine
from spec.stack_fabric import DeviceMode, FabricNetwork, fabric_networks, fabric_subnets


@dataclass(frozen=True)
class Attachment:
    """One network of a node, in GKE's order; names are short names."""

    name: str
    """Of the Network object."""
    mode: DeviceMode
    network: pulumi.Output[str]
    subnetwork: pulumi.Output[str]


@dataclass(frozen=True, kw_only=True)
class GpuFabricArgs:
    """Fabric of one machine type."""

    project: str
    region: str
    zone: str
    """Zone of the GPUs, to which a RoCE network is bound."""
    cluster: str
    row: Machine
    cidr: str
    """Cut into the subnets."""
    mtu: int
    protect: bool


class GpuFabric(pulumi.ComponentResource):
    """Networks, subnets and, for what is not RoCE, a firewall rule."""

    def __init__(self, name: str, args: GpuFabricArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:GpuFabric", name, None, opts)
        networks, ranges = fabric_networks(args.row), fabric_subnets(args.row, cidr=args.cidr)
        shared = None if all(one.own_vpc for one in networks) else self._roce(args)
        self.attachments = [self._attach(args, one, ranges, shared) for one in networks]
        self.register_outputs({"networks": [one.name for one in networks]})

    def _attach(
        self, args: GpuFabricArgs, one: FabricNetwork, ranges: Mapping[str, str], shared: compute.Network | None
    ) -> Attachment:
        network = self._own(args, one.name) if one.own_vpc or shared is None else shared
        subnet = compute.Subnetwork(
            one.name,
            name=f"{args.cluster}-{one.name}",
            project=args.project,
            region=args.region,
            network=network.id,
            ip_cidr_range=ranges[one.name],
            opts=options(self, kind="network", protect=args.protect),
        )
        return Attachment(one.name, one.mode, network.name, subnet.name)

    def _own(self, args: GpuFabricArgs, name: str) -> compute.Network:
        """A network for one NIC, open to the other nodes of the same fabric."""
        network = compute.Network(
            name,
            name=f"{args.cluster}-{name}",
            project=args.project,
            auto_create_subnetworks=False,
            mtu=args.mtu,
            routing_mode="REGIONAL",
            opts=options(self, kind="network", protect=args.protect),
        )
        compute.Firewall(
            name,
            name=f"{args.cluster}-{name}-inside",
            project=args.project,
            network=network.id,
            direction="INGRESS",
            source_ranges=[args.cidr],
            allows=[compute.FirewallAllowArgs(protocol=protocol) for protocol in ("tcp", "udp", "icmp")],
            opts=options(self),
        )
        return network

    def _roce(self, args: GpuFabricArgs) -> compute.Network:
        return compute.Network(
            "rdma",
            name=f"{args.cluster}-rdma",
            project=args.project,
            auto_create_subnetworks=False,
            mtu=args.mtu,
            routing_mode="REGIONAL",
            network_profile=f"projects/{args.project}/global/networkProfiles/{args.zone}-vpc-roce",
            opts=options(self, kind="network", protect=args.protect),
        )
