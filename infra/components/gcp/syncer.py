"""How syncers of a region are reached by pods of the others: two ports, one address, nothing else.

Regions talk to each other for this only. The address is reserved in the region's subnet, so that it outlives the load
balancer that the platform stack puts behind it and can stand in the facts. Only machines without GPUs are opened: a
syncer never runs on others.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import compute

from infra.components.base import options
from spec.stack_region import SyncerAccess as Config


@dataclass(frozen=True, kw_only=True)
class SyncerAccessArgs:
    """Access to syncers of one cluster."""

    project: str
    region: str
    cluster: str
    network: pulumi.Input[str]
    """Id of the primary network."""
    subnet: pulumi.Input[str]
    """Id of the region's subnet."""
    pods: str
    """Range in which the pods of all regions are."""
    target_tag: str
    """Network tag of the machines on which syncers run."""
    access: Config
    labels: dict[str, str]
    protect: bool


class SyncerAccess(pulumi.ComponentResource):
    """Declares both; an address that somebody else routes is taken as it is."""

    def __init__(self, name: str, args: SyncerAccessArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:SyncerAccess", name, None, opts)
        ports = [str(args.access.control_port), str(args.access.bulk_port)]
        compute.Firewall(
            "syncer",
            name=f"{args.cluster}-syncer",
            project=args.project,
            network=args.network,
            direction="INGRESS",
            source_ranges=[args.pods],
            target_tags=[args.target_tag],
            allows=[compute.FirewallAllowArgs(protocol="tcp", ports=ports)],
            opts=options(self),
        )
        self.reserved = not args.access.host
        self.host = self._address(args) if self.reserved else pulumi.Output.from_input(args.access.host)
        self.register_outputs({"host": self.host})

    def _address(self, args: SyncerAccessArgs) -> pulumi.Output[str]:
        return compute.Address(
            "syncer",
            name=f"{args.cluster}-syncer",
            project=args.project,
            region=args.region,
            subnetwork=args.subnet,
            address_type="INTERNAL",
            purpose="SHARED_LOADBALANCER_VIP",
            labels=args.labels,
            opts=options(self, kind="network", protect=args.protect),
        ).address
