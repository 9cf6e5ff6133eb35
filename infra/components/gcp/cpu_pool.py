"""Machines without GPUs, in several zones: heads, services, syncers and the platform's own pods.

A zone that is out of stock must not keep GPUs idle, so the pool is never in the GPUs' zone alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import container

from infra.components.base import options
from infra.components.gcp.nodes import METADATA, SCOPES, shielded
from spec.stack_pool_checks import PODS_PER_CPU_NODE
from spec.stack_region import CpuPool as Config


@dataclass(frozen=True, kw_only=True)
class CpuPoolArgs:
    """The pool."""

    project: str
    cluster: pulumi.Input[str]
    location: pulumi.Input[str]
    pool: Config
    account: pulumi.Input[str]
    tag: str
    """Network tag, by which firewall rules name these machines."""
    labels: dict[str, str]
    protect: bool


class CpuPool(pulumi.ComponentResource):
    """Declares it."""

    def __init__(self, name: str, args: CpuPoolArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:CpuPool", name, None, opts)
        self.pool = container.NodePool(
            args.pool.name,
            name=args.pool.name,
            project=args.project,
            cluster=args.cluster,
            location=args.location,
            node_locations=args.pool.zones,
            # In each zone, so that GKE's own pods have a home before there is any GPU node.
            initial_node_count=1,
            autoscaling=container.NodePoolAutoscalingArgs(
                total_min_node_count=args.pool.min_nodes,
                total_max_node_count=args.pool.max_nodes,
                location_policy="BALANCED",
            ),
            max_pods_per_node=PODS_PER_CPU_NODE,
            management=container.NodePoolManagementArgs(auto_repair=True, auto_upgrade=True),
            upgrade_settings=container.NodePoolUpgradeSettingsArgs(strategy="SURGE", max_surge=1, max_unavailable=0),
            network_config=container.NodePoolNetworkConfigArgs(enable_private_nodes=True),
            node_config=_node_config(args),
            opts=options(self, kind="pool", protect=args.protect, ignore_changes=["version", "initialNodeCount"]),
        )
        self.register_outputs({"pool": self.pool.name})


def _node_config(args: CpuPoolArgs) -> container.NodePoolNodeConfigArgs:
    return container.NodePoolNodeConfigArgs(
        machine_type=args.pool.row.machine_type,
        boot_disk=container.NodePoolNodeConfigBootDiskArgs(disk_type="pd-balanced", size_gb=args.pool.boot_disk_gb),
        image_type="COS_CONTAINERD",
        gvnic=container.NodePoolNodeConfigGvnicArgs(enabled=True),
        gcfs_config=container.NodePoolNodeConfigGcfsConfigArgs(enabled=True),
        tags=[args.tag],
        resource_labels=args.labels,
        service_account=args.account,
        oauth_scopes=SCOPES,
        metadata=METADATA,
        shielded_instance_config=shielded(),
        workload_metadata_config=container.NodePoolNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
        kubelet_config=container.NodePoolNodeConfigKubeletConfigArgs(insecure_kubelet_readonly_port_enabled="FALSE"),
    )
