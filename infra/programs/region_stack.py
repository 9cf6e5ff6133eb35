"""Program of a region stack: one cluster with its network, its machines, its storage and how its syncers are reached.

Reads the environment's outputs once, at the start: how many resources there are must not depend on a value that comes
later, or a preview would not show them. A region never reads another region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pulumi
import pulumi_gcp as gcp

from infra.components.base import stack_labels
from infra.components.gcp.cluster import RegionalCluster, RegionalClusterArgs
from infra.components.gcp.cpu_pool import CpuPool, CpuPoolArgs
from infra.components.gcp.fabric import GpuFabric, GpuFabricArgs
from infra.components.gcp.gpu_pool import GpuPool, GpuPoolArgs
from infra.components.gcp.network import RegionNetwork, RegionNetworkArgs
from infra.components.gcp.reservation import ReservationRef, ReservationRefArgs
from infra.components.gcp.storage import READ, WRITE, Grant, Storage, StorageArgs, cluster_pods, image_prefix
from infra.components.gcp.syncer import SyncerAccess, SyncerAccessArgs
from infra.outputs import GLOBAL_OUTPUT, KUBECONFIG_OUTPUT, REGION_OUTPUT, GlobalFacts, read_global
from infra.programs import Program
from spec.machines import machine
from spec.stack_region import LONGEST_RUN, RegionStack
from spec.stack_region import GpuPool as PoolConfig
from spec.stack_values import parse_reservation


def region_program(stack: str, *, config: RegionStack) -> Program:
    """The program of one region stack; the engine runs what it returns."""

    async def run() -> None:
        whole_name = f"{pulumi.get_organization()}/{pulumi.get_project()}/{config.global_stack}"
        reference = pulumi.StackReference(config.global_stack, stack_name=whole_name)
        details = await reference.get_output_details(GLOBAL_OUTPUT)
        value = cast("Mapping[str, Any] | None", details.value)
        Region(stack, config=config, environment=read_global(value, stack=config.global_stack)).declare()

    return run


class Region:
    """All parts of one region. Each method declares a part and returns what later parts build on."""

    def __init__(self, stack: str, *, config: RegionStack, environment: GlobalFacts) -> None:
        self._config = config
        self._environment = environment
        self._labels = stack_labels(stack, configured=config.labels)
        self._name = config.cluster.name
        self._tag = f"{config.cluster.name}-cpu"
        self._google = gcp.Provider("google", project=config.project, region=config.region)

    def declare(self) -> None:
        """Everything, in the order in which it must be there."""
        config = self._config
        network = self._network()
        fabrics = {name: fabric for name in config.fabrics if (fabric := self._fabric(name)) is not None}
        reservations = {one.path: self._reservation(one.path) for one in config.reservations}
        cluster = self._cluster(network)
        cpu = self._cpu_pool(cluster)
        pools = [self._gpu_pool(pool, cluster, cpu, fabrics, reservations) for pool in config.gpu_pools]
        self._storage(cluster)
        syncer = self._syncer(network) if config.syncer.mode == "firewall" else None
        pulumi.export(REGION_OUTPUT, self._facts(cluster, cpu, pools, fabrics, syncer))
        pulumi.export(KUBECONFIG_OUTPUT, cluster.kubeconfig)

    def _options(self) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(providers=[self._google])

    def _network(self) -> RegionNetwork:
        config = self._config
        args = RegionNetworkArgs(
            project=config.project,
            region=config.region,
            network=self._environment.network,
            subnet=f"{self._environment.network_name}-{config.region}",
            ranges=config.network,
            labels=self._labels,
            protect=config.protect,
        )
        return RegionNetwork(self._name, args, opts=self._options())

    def _fabric(self, name: str) -> GpuFabric | None:
        """Networks of one machine type; none where GKE makes them."""
        config, fabric, row = self._config, self._config.fabrics[name], machine(name)
        if fabric.mode == "dranet" or fabric.range is None:
            return None
        args = GpuFabricArgs(
            project=config.project,
            region=config.region,
            zone=next(pool.zone for pool in config.gpu_pools if pool.machine == name),
            cluster=config.cluster.name,
            row=row,
            cidr=fabric.range,
            mtu=config.mtu(name),
            protect=config.protect,
        )
        return GpuFabric(f"{self._name}-{name}", args, opts=self._options())

    def _reservation(self, path: str) -> ReservationRef:
        found = next(one for one in self._config.reservations if one.path == path)
        part = parse_reservation(path)
        return ReservationRef(
            f"{part.project}-{part.name}", ReservationRefArgs(reservation=found), opts=self._options()
        )

    def _cluster(self, network: RegionNetwork) -> RegionalCluster:
        config = self._config
        args = RegionalClusterArgs(
            project=config.project,
            region=config.region,
            zones=config.cpu_pool.zones,
            network=self._environment.network,
            subnet=network.subnet.id,
            config=config.cluster,
            after=[network.way_out],
            account=self._environment.node_account,
            researchers=self._environment.researchers,
            labels=self._labels,
            protect=config.protect,
        )
        return RegionalCluster(self._name, args, opts=self._options())

    def _cpu_pool(self, cluster: RegionalCluster) -> CpuPool:
        config = self._config
        args = CpuPoolArgs(
            project=config.project,
            cluster=cluster.cluster.id,
            location=cluster.cluster.location,
            pool=config.cpu_pool,
            account=self._environment.node_account,
            tag=self._tag,
            labels=self._labels,
            protect=config.protect,
        )
        return CpuPool(f"{self._name}-{config.cpu_pool.name}", args, opts=self._options())

    def _gpu_pool(
        self,
        pool: PoolConfig,
        cluster: RegionalCluster,
        cpu: CpuPool,
        fabrics: Mapping[str, GpuFabric],
        reservations: Mapping[str, ReservationRef],
    ) -> GpuPool:
        config, fabric = self._config, fabrics.get(pool.machine)
        configured, bound = config.fabrics.get(pool.machine), pool.capacity.reserved
        reservation = reservations.get(bound.reservation) if bound else None
        args = GpuPoolArgs(
            project=config.project,
            cluster=cluster.cluster.id,
            location=cluster.cluster.location,
            pool=pool,
            nodes=config.nodes_now(pool),
            maintenance_interval=config.maintenance_interval(pool),
            attachments=fabric.attachments if fabric else (),
            dranet=configured is not None and configured.mode == "dranet",
            after=[cpu.pool, *(reservation.made if reservation else [])],
            account=self._environment.node_account,
            labels=self._labels,
            protect=config.protects(pool),
        )
        return GpuPool(f"{self._name}-{pool.name}", args, opts=self._options())

    def _storage(self, cluster: RegionalCluster) -> None:
        config, environment = self._config, self._environment
        pods = cluster.cluster.name.apply(
            lambda name: cluster_pods(
                name, project=config.project, number=environment.project_number, location=config.region
            )
        )
        args = StorageArgs(
            project=config.project,
            location=config.region,
            labels=self._labels,
            protect=config.protect,
            buckets=[config.bucket, *config.buckets],
            grants=[Grant("pods", pods, WRITE), *(Grant(one, one, WRITE) for one in environment.researchers)],
            registries=[config.registry],
            image_readers={"nodes": f"serviceAccount:{environment.node_account}"},
            lustre=config.lustre,
            network=environment.network,
            elsewhere={bucket: Grant("pods", pods, READ) for bucket in environment.shared_buckets},
        )
        Storage(self._name, args, opts=self._options())

    def _syncer(self, network: RegionNetwork) -> SyncerAccess:
        config = self._config
        args = SyncerAccessArgs(
            project=config.project,
            region=config.region,
            cluster=config.cluster.name,
            network=self._environment.network,
            subnet=network.subnet.id,
            pods=self._environment.pods,
            target_tag=self._tag,
            access=config.syncer,
            labels=self._labels,
            protect=config.protect,
        )
        return SyncerAccess(self._name, args, opts=self._options())

    def _facts(
        self,
        cluster: RegionalCluster,
        cpu: CpuPool,
        pools: Sequence[GpuPool],
        fabrics: Mapping[str, GpuFabric],
        syncer: SyncerAccess | None,
    ) -> dict[str, Any]:
        """`infra.facts.RegionFacts`, with outputs of resources in it, so that it is said only of what is there."""
        config, first = self._config, self._config.cpu_pool
        sized = {} if first.cpu is None else {"cpu": first.cpu, "memory": first.memory}
        own = [
            {"name": made.pool.name, "machine": pool.machine, "nodes": config.nodes_now(pool)}
            for pool, made in zip(config.gpu_pools, pools, strict=True)
        ]
        return {
            "version": 1,
            "name": cluster.cluster.name,
            "region": config.region,
            "project": config.project,
            "pools": [
                {"name": cpu.pool.name, "machine": first.machine, "nodes": first.max_nodes, **sized},
                *own,
            ],
            "bucket": config.bucket.address,
            "registry": image_prefix(config.registry, project=config.project, location=config.region),
            "fabrics": [
                {"machine": name, "networks": _networks(fabrics[name]) if name in fabrics else []}
                for name in config.fabrics
            ],
            "syncer": self._reach(syncer) if syncer else None,
            "managed_monitoring": config.cluster.dcgm,
            "alert_channels": self._environment.alert_channels,
            "researchers": self._environment.researchers,
            "queued": {
                one.name: int(one.capacity.max_run or LONGEST_RUN) for one in config.gpu_pools if one.capacity.queued
            },
        }

    def _reach(self, syncer: SyncerAccess) -> dict[str, Any]:
        access = self._config.syncer
        return {
            "control_port": access.control_port,
            "bulk_port": access.bulk_port,
            "host": syncer.host,
            "reserved": syncer.reserved,
            "peers": [self._environment.pods],
        }


def _networks(fabric: GpuFabric) -> list[dict[str, Any]]:
    return [
        {"name": one.name, "network": one.network, "subnetwork": one.subnetwork, "mode": one.mode}
        for one in fabric.attachments
    ]
