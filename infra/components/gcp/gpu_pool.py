"""A pool of GPU machines of one zone.

It has exactly as many nodes as configured, none while its reservation has not been delivered, and flex-start pools none
until something asks. It waits for the CPU pool (GKE's own pods must have somewhere to go, and heads need it first) and
for its fabric, whose networks in their order are part of its identity. What replaces a pool is in
`infra.review.fields`; a replacement deletes first, because a reservation has no machines for two pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
from pulumi_gcp import container

from infra.components.base import options
from infra.components.gcp.fabric import Attachment
from infra.components.gcp.nodes import gpu_node_config
from spec.stack_region import GpuPool as Config


@dataclass(frozen=True, kw_only=True)
class GpuPoolArgs:
    """One pool."""

    project: str
    cluster: pulumi.Input[str]
    """Id of the cluster."""
    location: pulumi.Input[str]
    """The cluster's location. A pool with another one is replaced at every update."""
    pool: Config
    nodes: int
    """Nodes of today."""
    maintenance_interval: str | None
    attachments: Sequence[Attachment]
    """Networks besides the primary one; empty for a machine without fabric and for DRANET."""
    dranet: bool
    after: Sequence[pulumi.Resource]
    """The CPU pool, and a reservation that the stack makes. Given to the pool itself: what a component waits for is
    kept in no state, and a later update would not know it.
    """
    account: pulumi.Input[str]
    labels: dict[str, str]
    protect: bool


class GpuPool(pulumi.ComponentResource):
    """Declares it."""

    def __init__(self, name: str, args: GpuPoolArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:GpuPool", name, None, opts)
        pool, flex = args.pool, args.pool.capacity.kind == "flex-start"
        self.pool = container.NodePool(
            pool.name,
            name=pool.name,
            project=args.project,
            cluster=args.cluster,
            location=args.location,
            node_locations=[pool.zone],
            node_count=None if flex else args.nodes,
            initial_node_count=0 if flex else None,
            autoscaling=_flexible(args.nodes) if flex else None,
            max_pods_per_node=pool.max_pods_per_node,
            queued_provisioning=_QUEUED if pool.capacity.queued else None,
            placement_policy=_COMPACT if pool.capacity.compact_placement else None,
            # Queued machines are given back rather than mended.
            management=container.NodePoolManagementArgs(auto_repair=not flex, auto_upgrade=True),
            upgrade_settings=None if flex else _upgrades(pool),
            network_config=_networks(args),
            node_config=gpu_node_config(
                pool,
                account=args.account,
                labels=args.labels,
                maintenance_interval=args.maintenance_interval,
                dranet=args.dranet,
            ),
            # The version follows the cluster's channel; the initial count is of the day the pool was made.
            opts=options(
                self,
                kind="pool",
                protect=args.protect,
                ignore_changes=["version", "initialNodeCount"],
                depends_on=args.after,
            ),
        )
        self.register_outputs({"pool": self.pool.name, "gpus": args.nodes * pool.row.gpus})


_QUEUED = container.NodePoolQueuedProvisioningArgs(enabled=True)
_COMPACT = container.NodePoolPlacementPolicyArgs(type="COMPACT")


def _flexible(most: int) -> container.NodePoolAutoscalingArgs:
    return container.NodePoolAutoscalingArgs(total_min_node_count=0, total_max_node_count=most, location_policy="ANY")


def _upgrades(pool: Config) -> container.NodePoolUpgradeSettingsArgs:
    return container.NodePoolUpgradeSettingsArgs(
        strategy="SURGE", max_surge=pool.upgrade.max_surge, max_unavailable=pool.upgrade.max_unavailable
    )


def _networks(args: GpuPoolArgs) -> container.NodePoolNetworkConfigArgs:
    attached = [
        container.NodePoolNetworkConfigAdditionalNodeNetworkConfigArgs(network=one.network, subnetwork=one.subnetwork)
        for one in args.attachments
    ]
    return container.NodePoolNetworkConfigArgs(
        enable_private_nodes=True,
        accelerator_network_profile="auto" if args.dranet else None,
        additional_node_network_configs=attached or None,
    )
