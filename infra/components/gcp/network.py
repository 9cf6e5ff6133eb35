"""The primary network: one for all regions of an environment, with each region's subnet and way out.

The network is the global stack's, the subnet the region's. Regions route to each other without peering, so their ranges
must not overlap (checked in `spec.stack_cross_checks`). Nodes have no public address: Google's own services are reached
from inside, everything else through NAT with addresses that others can put on an allow list.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network

import pulumi
from pulumi_gcp import compute, servicenetworking

from infra.components.base import options
from spec.stack_region import RegionNetwork as Ranges

PODS, SERVICES = "pods", "services"
"""Names of a subnet's secondary ranges."""
LUSTRE_PORTS = ["988", "6988"]
"""Servers call clients back: the second port where GKE's driver uses it in place of the first."""


@dataclass(frozen=True, kw_only=True)
class PrimaryNetworkArgs:
    """The network of an environment."""

    project: str
    network: str
    """Its name."""
    mtu: int
    services_access: str | None
    """Range for private services access; None: no managed file system can be reached."""
    labels: dict[str, str]
    protect: bool


class PrimaryNetwork(pulumi.ComponentResource):
    """Network, and the peering through which managed file systems are reached."""

    def __init__(self, name: str, args: PrimaryNetworkArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:PrimaryNetwork", name, None, opts)
        self.network = compute.Network(
            "primary",
            name=args.network,
            project=args.project,
            auto_create_subnetworks=False,
            mtu=args.mtu,
            # Regional: a region announces its own subnets only, whatever is peered later.
            routing_mode="REGIONAL",
            opts=options(self, kind="network", protect=args.protect),
        )
        if args.services_access is not None:
            self._services_access(args, IPv4Network(args.services_access))
        self.register_outputs({"network": self.network.name})

    def _services_access(self, args: PrimaryNetworkArgs, access: IPv4Network) -> None:
        address = compute.GlobalAddress(
            "services-access",
            name=f"{args.network}-services-access",
            project=args.project,
            purpose="VPC_PEERING",
            address_type="INTERNAL",
            address=str(access.network_address),
            prefix_length=access.prefixlen,
            network=self.network.id,
            labels=args.labels,
            opts=options(self, kind="network", protect=args.protect),
        )
        servicenetworking.Connection(
            "services-access",
            network=self.network.id,
            service="servicenetworking.googleapis.com",
            reserved_peering_ranges=[address.name],
            opts=options(self, kind="network", protect=args.protect),
        )
        compute.Firewall(
            "lustre",
            name=f"{args.network}-lustre",
            project=args.project,
            network=self.network.id,
            direction="INGRESS",
            source_ranges=[str(access)],
            allows=[compute.FirewallAllowArgs(protocol="tcp", ports=LUSTRE_PORTS)],
            opts=options(self),
        )


@dataclass(frozen=True, kw_only=True)
class RegionNetworkArgs:
    """A region's part."""

    project: str
    region: str
    network: pulumi.Input[str]
    """Id of the primary network."""
    subnet: str
    """Name of the subnet."""
    ranges: Ranges
    labels: dict[str, str]
    protect: bool


class RegionNetwork(pulumi.ComponentResource):
    """Subnet with the ranges of pods and services, and NAT."""

    def __init__(self, name: str, args: RegionNetworkArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:RegionNetwork", name, None, opts)
        self.subnet = compute.Subnetwork(
            "nodes",
            name=args.subnet,
            project=args.project,
            region=args.region,
            network=args.network,
            ip_cidr_range=args.ranges.nodes,
            # Buckets, images and logs then do not take NAT's ports.
            private_ip_google_access=True,
            secondary_ip_ranges=[
                compute.SubnetworkSecondaryIpRangeArgs(range_name=PODS, ip_cidr_range=args.ranges.pods),
                compute.SubnetworkSecondaryIpRangeArgs(range_name=SERVICES, ip_cidr_range=args.ranges.services),
            ],
            opts=options(self, kind="network", protect=args.protect),
        )
        addresses = [self._address(args, index) for index in range(args.ranges.nat.addresses)]
        self.way_out = self._nat(args, addresses)
        self.nat_addresses = [one.address for one in addresses]
        self.register_outputs({"subnet": self.subnet.name, "nat_addresses": self.nat_addresses})

    def _address(self, args: RegionNetworkArgs, index: int) -> compute.Address:
        return compute.Address(
            f"nat-{index}",
            name=f"{args.subnet}-nat-{index}",
            project=args.project,
            region=args.region,
            address_type="EXTERNAL",
            labels=args.labels,
            opts=options(self, kind="network", protect=args.protect),
        )

    def _nat(self, args: RegionNetworkArgs, addresses: list[compute.Address]) -> compute.RouterNat:
        router = compute.Router(
            "nat",
            name=f"{args.subnet}-nat",
            project=args.project,
            region=args.region,
            network=args.network,
            opts=options(self),
        )
        return compute.RouterNat(
            "nat",
            name=f"{args.subnet}-nat",
            project=args.project,
            region=args.region,
            router=router.name,
            nat_ip_allocate_option="MANUAL_ONLY",
            nat_ips=[one.self_link for one in addresses],
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetworks=[
                compute.RouterNatSubnetworkArgs(name=self.subnet.self_link, source_ip_ranges_to_nats=["ALL_IP_RANGES"])
            ],
            min_ports_per_vm=args.ranges.nat.ports_per_node,
            # Dynamic ports need powers of two and are refused together with endpoint-independent mapping.
            enable_dynamic_port_allocation=False,
            enable_endpoint_independent_mapping=False,
            log_config=compute.RouterNatLogConfigArgs(enable=True, filter="ERRORS_ONLY"),
            opts=options(self),
        )
