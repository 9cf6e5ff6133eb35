"""What all nodes have in common, and what GPU nodes have besides. Pure: argument objects from configuration."""

from __future__ import annotations

from collections.abc import Mapping

import pulumi
from pulumi_gcp import container

from spec.stack_region import Capacity, GpuPool

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
"""One scope; what nodes may do is their account's roles, which are few."""
METADATA = {"disable-legacy-endpoints": "true"}
"""Set by GKE anyway; a pool that does not say so is made again by the next update."""
GPU_TAINT = "nvidia.com/gpu"
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
DRANET_LABEL = "cloud.google.com/gke-networking-dra-driver"
_SYSCTLS = {"net.ipv4.tcp_rmem": "4096 87380 16777216", "net.ipv4.tcp_wmem": "4096 16384 16777216"}
"""One connection between regions or to a bucket may then fill a long link."""


def gpu_taint() -> container.NodePoolNodeConfigTaintArgs:
    """GKE adds its own only if there is another pool already; pods that ask for GPUs tolerate it."""
    return container.NodePoolNodeConfigTaintArgs(key=GPU_TAINT, value="present", effect="NO_SCHEDULE")


def affinity(capacity: Capacity) -> container.NodePoolNodeConfigReservationAffinityArgs:
    """One reservation, or block or sub-block of it, by full path; otherwise none, so that no reserved machine is taken
    by a pool that was not meant for it.
    """
    if capacity.kind == "reservation" and capacity.reservation:
        return container.NodePoolNodeConfigReservationAffinityArgs(
            consume_reservation_type="SPECIFIC_RESERVATION", key=RESERVATION_KEY, values=[capacity.reservation]
        )
    return container.NodePoolNodeConfigReservationAffinityArgs(consume_reservation_type="NO_RESERVATION")


def shielded() -> container.NodePoolNodeConfigShieldedInstanceConfigArgs:
    """Secure boot and integrity monitoring."""
    return container.NodePoolNodeConfigShieldedInstanceConfigArgs(
        enable_secure_boot=True, enable_integrity_monitoring=True
    )


def gpu_node_config(
    pool: GpuPool,
    *,
    account: pulumi.Input[str],
    labels: Mapping[str, str],
    maintenance_interval: str | None,
    dranet: bool,
) -> container.NodePoolNodeConfigArgs:
    """Node configuration of a GPU pool; values by machine type from the catalogue."""
    row, capacity = pool.row, pool.capacity
    flex = capacity.kind == "flex-start"
    driver = container.NodePoolNodeConfigGuestAcceleratorGpuDriverInstallationConfigArgs(gpu_driver_version=pool.driver)
    return container.NodePoolNodeConfigArgs(
        machine_type=row.machine_type,
        guest_accelerators=[
            container.NodePoolNodeConfigGuestAcceleratorArgs(
                type=row.accelerator, count=row.gpus, gpu_driver_installation_config=driver
            )
        ],
        boot_disk=container.NodePoolNodeConfigBootDiskArgs(disk_type=pool.disk, size_gb=pool.boot_disk.size_gb),
        ephemeral_storage_local_ssd_config=container.NodePoolNodeConfigEphemeralStorageLocalSsdConfigArgs(
            local_ssd_count=row.local_ssds
        ),
        image_type="COS_CONTAINERD",
        gvnic=container.NodePoolNodeConfigGvnicArgs(enabled=True),
        fast_socket=container.NodePoolNodeConfigFastSocketArgs(enabled=True) if pool.fast_socket else None,
        gcfs_config=container.NodePoolNodeConfigGcfsConfigArgs(enabled=pool.image_streaming),
        reservation_affinity=affinity(capacity),
        # Only what the reservation says: an interval of our own never matches it.
        host_maintenance_policy=container.NodePoolNodeConfigHostMaintenancePolicyArgs(
            maintenance_interval=maintenance_interval
        )
        if maintenance_interval
        else None,
        spot=True if capacity.kind == "spot" else None,
        flex_start=True if flex else None,
        max_run_duration=f"{int(capacity.max_run)}s" if flex and capacity.max_run else None,
        taints=[gpu_taint()],
        labels={**pool.labels, **({DRANET_LABEL: "true"} if dranet else {})},
        resource_labels=dict(labels),
        service_account=account,
        oauth_scopes=SCOPES,
        metadata=METADATA,
        shielded_instance_config=shielded(),
        workload_metadata_config=container.NodePoolNodeConfigWorkloadMetadataConfigArgs(mode="GKE_METADATA"),
        kubelet_config=container.NodePoolNodeConfigKubeletConfigArgs(insecure_kubelet_readonly_port_enabled="FALSE"),
        linux_node_config=container.NodePoolNodeConfigLinuxNodeConfigArgs(sysctls=_SYSCTLS),
    )
