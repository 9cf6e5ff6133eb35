"""One GKE cluster: regional control plane, private nodes, several networks per node.

Multi-networking and Dataplane V2 can be chosen only when a cluster is made. Pools are resources of their own, so the
default pool is removed; until it is, it runs as the same account with the same protections as the others, which is what
policies of an organisation look at. The control plane is reached through its DNS endpoint, by permission; by address
only from ranges that are configured. KubeRay is installed by the platform stack, so GKE's own Ray operator stays off:
two operators would fight over every cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import pulumi
from pulumi_gcp import container

from infra.components.base import options
from infra.components.gcp.kubeconfig import Reach, kubeconfig
from infra.components.gcp.network import PODS, SERVICES
from infra.components.gcp.nodes import METADATA, SCOPES
from spec.stack_region import ClusterConfig, Maintenance

DEFAULT_POOL_MACHINE = "e2-standard-4"
"""Lives for a minute."""
_METRICS = ["SYSTEM_COMPONENTS", "STORAGE", "HPA", "POD", "DAEMONSET", "DEPLOYMENT", "STATEFULSET", "KUBELET",
            "CADVISOR"]  # fmt: skip
"""GKE's defaults: a list that is given replaces them."""
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, kw_only=True)
class RegionalClusterArgs:
    """The cluster."""

    project: str
    region: str
    zones: list[str]
    """Zones of its default pool, and of pools that name none."""
    network: pulumi.Input[str]
    subnet: pulumi.Input[str]
    config: ClusterConfig
    after: Sequence[pulumi.Resource]
    """The way out: nodes of the default pool already pull images."""
    account: pulumi.Input[str]
    """Service account of nodes."""
    researchers: Sequence[str]
    """Members who launch in it."""
    labels: dict[str, str]
    protect: bool


class RegionalCluster(pulumi.ComponentResource):
    """Declares it, and says how it is reached."""

    def __init__(self, name: str, args: RegionalClusterArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:RegionalCluster", name, None, opts)
        config = args.config
        self.cluster = container.Cluster(
            config.name,
            name=config.name,
            project=args.project,
            location=args.region,
            node_locations=args.zones,
            network=args.network,
            subnetwork=args.subnet,
            networking_mode="VPC_NATIVE",
            ip_allocation_policy=container.ClusterIpAllocationPolicyArgs(
                cluster_secondary_range_name=PODS, services_secondary_range_name=SERVICES
            ),
            datapath_provider="ADVANCED_DATAPATH",
            enable_multi_networking=config.multi_networking,
            release_channel=container.ClusterReleaseChannelArgs(channel=config.channel),
            min_master_version=config.version,
            remove_default_node_pool=True,
            initial_node_count=1,
            node_config=_default_pool(args),
            private_cluster_config=container.ClusterPrivateClusterConfigArgs(
                enable_private_nodes=True, enable_private_endpoint=not config.authorized_ranges
            ),
            control_plane_endpoints_config=_endpoints(config),
            master_authorized_networks_config=_authorized(config),
            workload_identity_config=container.ClusterWorkloadIdentityConfigArgs(
                workload_pool=f"{args.project}.svc.id.goog"
            ),
            authenticator_groups_config=_groups(args.researchers),
            # Without it an internal load balancer has at most 250 nodes of the cluster behind it, whichever they are: a
            # syncer on another node could not be reached.
            enable_l4_ilb_subsetting=True,
            addons_config=_addons(config),
            monitoring_config=container.ClusterMonitoringConfigArgs(
                enable_components=[*_METRICS, *(["DCGM"] if config.dcgm else [])],
                managed_prometheus=container.ClusterMonitoringConfigManagedPrometheusArgs(enabled=True),
            ),
            logging_config=container.ClusterLoggingConfigArgs(enable_components=["SYSTEM_COMPONENTS", "WORKLOADS"]),
            maintenance_policy=_maintenance(config.maintenance),
            fleet=container.ClusterFleetArgs(project=args.project) if config.fleet else None,
            enable_shielded_nodes=True,
            deletion_protection=args.protect,
            resource_labels=args.labels,
            # The default pool's configuration is gone with it: the provider would replace the cluster over it at every
            # update. The version is not ignored: the provider never reads it back and raises it when it is raised here.
            opts=options(
                self, kind="cluster", protect=args.protect, ignore_changes=["nodeConfig", "initialNodeCount"],
                secret_outputs=["masterAuth"], depends_on=args.after,
            ),
        )  # fmt: skip
        self.kubeconfig = pulumi.Output.secret(self._kubeconfig(config.name))
        self.register_outputs({"cluster": self.cluster.name})

    def _kubeconfig(self, name: str) -> pulumi.Output[str]:
        endpoints, auth = self.cluster.control_plane_endpoints_config, self.cluster.master_auth
        return pulumi.Output.all(
            dns_endpoint=endpoints.apply(_dns_endpoint),
            address=self.cluster.endpoint,
            ca_certificate=auth.apply(lambda one: (one.cluster_ca_certificate if one else None) or ""),
            client_certificate=auth.apply(lambda one: (one.client_certificate if one else None) or ""),
            client_key=auth.apply(lambda one: (one.client_key if one else None) or ""),
        ).apply(lambda found: kubeconfig(name, reach=Reach(**found)))


def _dns_endpoint(endpoints: container.outputs.ClusterControlPlaneEndpointsConfig | None) -> str:
    dns = endpoints.dns_endpoint_config if endpoints else None
    return (dns.endpoint if dns else None) or ""


def _default_pool(args: RegionalClusterArgs) -> container.ClusterNodeConfigArgs:
    return container.ClusterNodeConfigArgs(
        machine_type=DEFAULT_POOL_MACHINE,
        service_account=args.account,
        oauth_scopes=SCOPES,
        metadata=METADATA,
        resource_labels=args.labels,
        shielded_instance_config=container.ClusterNodeConfigShieldedInstanceConfigArgs(
            enable_secure_boot=True, enable_integrity_monitoring=True
        ),
        workload_metadata_config=container.ClusterNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
    )


def _endpoints(config: ClusterConfig) -> container.ClusterControlPlaneEndpointsConfigArgs:
    return container.ClusterControlPlaneEndpointsConfigArgs(
        dns_endpoint_config=container.ClusterControlPlaneEndpointsConfigDnsEndpointConfigArgs(
            allow_external_traffic=config.external_access
        ),
        ip_endpoints_config=container.ClusterControlPlaneEndpointsConfigIpEndpointsConfigArgs(
            enabled=bool(config.authorized_ranges)
        ),
    )


def _authorized(config: ClusterConfig) -> container.ClusterMasterAuthorizedNetworksConfigArgs | None:
    if not config.authorized_ranges:
        return None
    return container.ClusterMasterAuthorizedNetworksConfigArgs(
        gcp_public_cidrs_access_enabled=False,
        cidr_blocks=[
            container.ClusterMasterAuthorizedNetworksConfigCidrBlockArgs(cidr_block=one)
            for one in config.authorized_ranges
        ],
    )


def _groups(members: Sequence[str]) -> container.ClusterAuthenticatorGroupsConfigArgs | None:
    """The one group through which a cluster resolves others in its role bindings; its name is GKE's to say."""
    domains = [one.partition("@")[2] for one in members if one.startswith("group:")]
    if not domains:
        return None
    return container.ClusterAuthenticatorGroupsConfigArgs(security_group=f"gke-security-groups@{domains[0]}")


def _addons(config: ClusterConfig) -> container.ClusterAddonsConfigArgs:
    """Each said in so many words: what is left out keeps its last state in the cluster."""
    addons = config.addons
    return container.ClusterAddonsConfigArgs(
        dns_cache_config=container.ClusterAddonsConfigDnsCacheConfigArgs(enabled=True),
        gce_persistent_disk_csi_driver_config=container.ClusterAddonsConfigGcePersistentDiskCsiDriverConfigArgs(
            enabled=True
        ),
        gcs_fuse_csi_driver_config=container.ClusterAddonsConfigGcsFuseCsiDriverConfigArgs(enabled=addons.gcs_fuse),
        gcp_filestore_csi_driver_config=container.ClusterAddonsConfigGcpFilestoreCsiDriverConfigArgs(
            enabled=addons.filestore
        ),
        lustre_csi_driver_config=container.ClusterAddonsConfigLustreCsiDriverConfigArgs(enabled=addons.lustre),
    )


def _maintenance(config: Maintenance) -> container.ClusterMaintenancePolicyArgs:
    start = datetime.strptime(config.window_start, _TIME)  # noqa: DTZ007  (the text says Z; only hours are added)
    window = container.ClusterMaintenancePolicyRecurringWindowArgs(
        start_time=config.window_start,
        end_time=(start + timedelta(hours=config.window_hours)).strftime(_TIME),
        recurrence=config.recurrence,
    )
    exclusion = container.ClusterMaintenancePolicyMaintenanceExclusionArgs(
        exclusion_name="nodes-until-end-of-support",
        start_time=config.window_start,
        exclusion_options=container.ClusterMaintenancePolicyMaintenanceExclusionExclusionOptionsArgs(
            scope="NO_MINOR_OR_NODE_UPGRADES", end_time_behavior="UNTIL_END_OF_SUPPORT"
        ),
    )
    return container.ClusterMaintenancePolicyArgs(
        recurring_window=window, maintenance_exclusions=[exclusion] if config.exclude_node_upgrades else []
    )
