"""Configuration of a region stack: one cluster with its network, its machines and where their capacity comes from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Document
from spec.machines import Machine, machine
from spec.stack_common import Bucket, Labels, Registry, StackBase
from spec.stack_values import (
    Cidr,
    CloudName,
    ReservationPath,
    ReservationText,
    StackText,
    UtcTime,
    Version,
    parse_reservation,
)
from spec.units import ByteSize, Cores, Seconds

LONGEST_RUN = 604_800
"""Seconds that flex-start machines are kept at most."""


class Nat(Document):
    """The way out of private nodes."""

    addresses: int = Field(default=2, ge=1, le=64)
    """Static addresses, which others can put on an allow list. One serves 63 nodes of 1,024 ports each."""
    ports_per_node: int = Field(default=1024, ge=64, le=32768)
    """Ports of a node, taken from the addresses for each node that there is; image pulls need many."""


class RegionNetwork(Document):
    """The region's part of the primary network. None of its ranges may overlap any other region's."""

    nodes: Cidr
    """Addresses of nodes."""
    pods: Cidr
    """Addresses of pods: with 32 pods per GPU node each takes a /26, with 110 per CPU node a /24."""
    services: Cidr
    """Cluster addresses of services."""
    nat: Nat = Nat()
    """The way out."""


class Maintenance(Document):
    """When GKE may upgrade the cluster; host maintenance is outside of it."""

    window_start: UtcTime = "2026-01-03T02:00:00Z"
    """Start of the first window."""
    window_hours: int = Field(default=12, ge=4, le=24)
    """Length of a window; blocks below four hours do not count."""
    recurrence: str = Field(default="FREQ=WEEKLY;BYDAY=SA,SU", pattern=r"^FREQ=(DAILY|WEEKLY)")
    """Days of windows, as an RFC 5545 rule."""
    exclude_node_upgrades: bool = True
    """No minor upgrades of the control plane and no upgrades of nodes until the version is out of support."""


class Addons(Document):
    """Drivers of the cluster for storage outside it."""

    gcs_fuse: bool = False
    """Buckets as folders."""
    lustre: bool = False
    """Managed Lustre."""
    filestore: bool = False
    """Filestore, for home folders."""


class ClusterConfig(Document):
    """The cluster."""

    name: CloudName
    """Its name, by which experiments choose it."""
    version: Version
    """Exact version of the control plane."""
    channel: Literal["RAPID", "REGULAR", "STABLE", "EXTENDED"] = "REGULAR"
    """Release channel."""
    maintenance: Maintenance = Maintenance()
    """When GKE may upgrade."""
    external_access: bool = True
    """The DNS endpoint answers from outside the network, to who has the permission."""
    authorized_ranges: list[Cidr] = []
    """Who may reach the control plane by address; empty: nobody, only the DNS endpoint."""
    multi_networking: bool = True
    """Several networks per node; can be chosen only when the cluster is made, and GPU fabrics need it."""
    fleet: bool = False
    """Register in the project's fleet."""
    dcgm: bool = True
    """Collect DCGM's metrics."""
    addons: Addons = Addons()
    """Storage drivers."""


class CpuPool(Document):
    """Machines for heads, services, the syncer and the platform's own pods."""

    name: CloudName = "cpu"
    """Name of the pool."""
    machine: str = "n2-standard-32"
    """Row of the machine catalogue."""
    zones: list[str] = Field(min_length=1)
    """Zones; several, so that one without stock does not keep GPUs idle."""
    min_nodes: int = Field(default=1, ge=1)
    """Fewest nodes over all zones."""
    max_nodes: int = Field(ge=1)
    """Most nodes over all zones; what facts offer."""
    boot_disk_gb: int = Field(default=200, ge=50)
    """Size of the boot disk."""
    cpu: Cores | None = None
    """Cores a node offers, where the catalogue's row has no size (a test bed)."""
    memory: ByteSize | None = None
    """Memory a node offers, where the catalogue's row has no size."""

    @property
    def row(self) -> Machine:
        """Its row of the catalogue; checked before."""
        return machine(self.machine)


class Reservation(Document):
    """Capacity that people have bought, as the cloud shows it."""

    path: ReservationText
    """Full path of the whole reservation: projects/P/reservations/R."""
    zone: str
    """The zone its machines are in."""
    machine: str
    """Row of the machine catalogue."""
    nodes: int = Field(ge=1)
    """Machines in it."""
    delivered: bool = True
    """Its machines exist. Until then pools bound to it have no nodes."""
    maintenance_interval: Literal["PERIODIC"] | None = None
    """As the reservation shows it; pools must say the same or do not match it."""
    create: bool = False
    """Make it with this stack. It costs money from that moment until it is deleted by hand."""


class Capacity(Document):
    """Where a pool's machines come from."""

    kind: Literal["reservation", "spot", "flex-start", "on-demand"]
    """Reserved, spare (can be taken back at any time), queued for a limited time, or at once at list price."""
    reservation: ReservationText | None = None
    """The reservation, or one block or sub-block of it, by full path. Exactly one."""
    max_run: Seconds | None = Field(default=None, ge=600, le=LONGEST_RUN)
    """How long flex-start machines are kept; at most seven days, which is the default."""
    queued: bool = False
    """Flex-start only: all nodes of a request at once or none."""
    compact_placement: bool = False
    """Ask for neighbouring machines; a reservation already is a place."""

    @property
    def reserved(self) -> ReservationPath | None:
        """The reservation's path, taken apart."""
        return parse_reservation(self.reservation) if self.reservation else None


class BootDisk(Document):
    """Boot disk of a GPU node."""

    kind: Literal["pd-balanced", "pd-ssd", "hyperdisk-balanced"] | None = None
    """Default: the first that the machine takes."""
    size_gb: int = Field(default=200, ge=50)
    """Size."""


class Upgrade(Document):
    """How nodes are replaced when GKE upgrades them."""

    max_surge: int = Field(default=0, ge=0)
    """Machines more than the pool's meanwhile; a reservation has none to give."""
    max_unavailable: int = Field(default=1, ge=1)
    """Nodes upgraded at once; one at a time takes nine minutes and more each, so a pool between jobs may name all."""


class GpuPool(Document):
    """Equal machines with GPUs in one zone."""

    name: CloudName
    """Name of the pool; changing it makes a new pool."""
    machine: str
    """Row of the machine catalogue, such as a3-ultra."""
    zone: str
    """The one zone of its nodes."""
    nodes: int = Field(ge=0)
    """Machines; for flex-start the most at once."""
    capacity: Capacity
    """Where they come from."""
    driver: Literal["LATEST", "DEFAULT"] = "LATEST"
    """GPU driver that GKE installs, without which nodes have no GPUs; a change replaces the pool."""
    boot_disk: BootDisk = BootDisk()
    """Boot disk."""
    local_ssds: int | None = None
    """Local SSDs for pods' scratch space; default and only choice: the machine's."""
    max_pods_per_node: int = Field(default=32, ge=8, le=256)
    """A change replaces the pool."""
    image_streaming: bool = True
    """Start containers before their image is here in full."""
    fast_socket: bool = False
    """NCCL Fast Socket, only for machines without GPUDirect."""
    upgrade: Upgrade = Upgrade()
    """How nodes are replaced."""
    labels: Labels = {}
    """Node labels beside those of GKE and of the program."""
    protect: bool | None = None
    """Refuse to delete or replace it; default: the stack's."""

    @property
    def row(self) -> Machine:
        """Its row of the catalogue; checked before."""
        return machine(self.machine)

    @property
    def disk(self) -> str:
        """Kind of boot disk in effect."""
        return self.boot_disk.kind or self.row.boot_disks[0]


class Fabric(Document):
    """The networks that GPUs of one machine type talk over; they never leave their cluster."""

    mode: Literal["device", "dranet"] = "device"
    """Networks of our own and Network objects, or GKE's managed DRANET."""
    range: Cidr | None = None
    """Addresses of its subnets, cut into sixteen; may be used again by other clusters. Not for dranet."""
    mtu: int | None = Field(default=None, ge=1300, le=8896)
    """Largest packet; default: what the machine needs."""


class Lustre(Document):
    """A managed Lustre file system."""

    name: CloudName
    """Instance id."""
    zone: str
    """Zone; the GPUs'."""
    capacity_gib: int = Field(ge=1)
    """Size, in the steps that the service allows for the throughput."""
    throughput: Literal[125, 250, 500, 1000] = 500
    """MB/s for each TiB."""


class SyncerAccess(Document):
    """How syncers of this region are reached by pods of the others."""

    mode: Literal["firewall", "none"] = "firewall"
    """Open the two ports to the pods of all regions, or to nobody."""
    control_port: int = Field(default=7070, ge=1024, le=65535)
    """Port of control requests; equal in all regions."""
    bulk_port: int = Field(default=7071, ge=1024, le=65535)
    """Port of weights; equal in all regions."""
    host: str = ""
    """Address at which syncers are reached; default: one is reserved in the region's subnet."""


class RegionStack(StackBase):
    """One region: one cluster."""

    kind: Literal["region"]
    """Kind of stack."""
    region: str
    """Google Cloud's region; the stack's name says the same."""
    global_stack: StackText
    """The global stack it builds on."""
    network: RegionNetwork
    """Its part of the primary network."""
    cluster: ClusterConfig
    """The cluster."""
    cpu_pool: CpuPool
    """Machines without GPUs."""
    gpu_pools: list[GpuPool] = []
    """Machines with GPUs."""
    reservations: list[Reservation] = []
    """Reservations that pools are bound to."""
    fabrics: dict[str, Fabric] = {}
    """Fabric of each machine type that has one."""
    bucket: Bucket
    """The region's bucket for data, checkpoints and runs."""
    buckets: list[Bucket] = []
    """More buckets."""
    registry: Registry
    """The region's images."""
    lustre: list[Lustre] = []
    """Lustre file systems."""
    syncer: SyncerAccess = SyncerAccess()
    """How syncers are reached."""

    def nodes_now(self, pool: GpuPool) -> int:
        """Nodes to ask for today: none while the pool's reservation has not been delivered."""
        bound = pool.capacity.reserved
        waiting = any(bound and one.path == bound.reservation and not one.delivered for one in self.reservations)
        return 0 if waiting else pool.nodes

    def protects(self, pool: GpuPool) -> bool:
        """Whether the pool must not be deleted or replaced."""
        return self.protect if pool.protect is None else pool.protect

    def maintenance_interval(self, pool: GpuPool) -> str | None:
        """What its reservation says, which the pool must repeat."""
        bound = pool.capacity.reserved
        found = (one.maintenance_interval for one in self.reservations if bound and one.path == bound.reservation)
        return next(found, None)

    def mtu(self, name: str) -> int:
        """Largest packet on the fabric of a machine type."""
        return self.fabrics[name].mtu or machine(name).fabric_mtu
