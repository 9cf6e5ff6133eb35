"""Configuration of a platform stack: what runs in a region's cluster before any experiment does."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Document
from spec.names import Name
from spec.services import ServiceConfig
from spec.stack_common import StackBase
from spec.stack_values import FixedImage, Image, StackText
from spec.units import ByteSize, Cores, Seconds


class Chart(Document):
    """An operator's installation and where it is read from."""

    source: str
    """`oci://...` for a chart in a registry, else a folder with a chart or manifests; $NAME is taken from the
    environment, so that no path of one machine is written here.
    """
    version: str = Field(pattern=r"^\d+\.\d+\.\d+([-+][0-9A-Za-z.-]+)?$")
    """Exact version."""


class Installers(Document):
    """Images of what prepares GPU nodes. Versions of one fabric belong together: those of the receive daemon that
    `manifests` puts beside GPU pods go with the plugin here, and both change only while no GPU pod runs.
    """

    tcpxo_plugin: FixedImage | None = None
    """NCCL plugin of GPUDirect-TCPXO; A3 Mega needs it."""
    nri_injector: FixedImage | None = None
    """Gives devices to pods that are not privileged; A3 Mega needs it."""
    gib_plugin: FixedImage | None = None
    """NCCL plugin of GPUDirect-RDMA; A3 Ultra and A4 need it."""
    pause: FixedImage = "gke.gcr.io/pause:3.8@sha256:880e63f94b145e46f1b1082bb71b85e21f16b99b180b9996407d61240ceb9830"
    """What an installer's pod runs when it is done."""


class Queue(Document):
    """A queue of experiments."""

    name: Name
    """As experiments name it."""
    nodes: dict[str, int] = {}
    """Nodes of each pool that it may hand out, by name of the pool; a pool that is left out gives none."""
    cohort: str = ""
    """Queues of one cohort lend each other what they do not use."""
    borrow_nodes: dict[str, int] = {}
    """Most nodes of a pool that it may borrow; default: all that others do not use."""
    preempt_lower: bool = True
    """An experiment of higher priority stops those of lower priority."""


class Kueue(Document):
    """The scheduler's queues."""

    chart: Chart
    """The operator."""
    image: str = ""
    """The operator's image where the chart's own cannot be pulled (a test bed)."""
    cpu: Cores = 0.5
    """Cores of the operator."""
    memory: ByteSize = 2 * 2**30
    """Memory of the operator, which keeps all nodes and their topology: the default is for thousands."""
    topology: bool = True
    """Place the nodes of a group close together; needs topology labels on all GPU nodes."""
    topology_levels: list[str] = [
        "cloud.google.com/gce-topology-block",
        "cloud.google.com/gce-topology-subblock",
        "cloud.google.com/gce-topology-host",
        "kubernetes.io/hostname",
    ]
    """Node labels, from the widest level to the node."""
    placement_level: str = "cloud.google.com/gce-topology-subblock"
    """Level in which a group is placed together if it fits."""
    queues: list[Queue] = Field(min_length=1)
    """Queues; the first is the default."""
    priorities: dict[str, int] = {"low": -100, "normal": 0, "high": 100}
    """Priorities by name; a higher number goes first."""
    wait_for_pods_ready: Seconds | None = Field(default=None, ge=60)
    """An admitted experiment whose pods are not ready by then goes back to its queue; default: it may wait."""
    ignore_undeclared: bool = False
    """Admit requests for resources that no quota names."""


class KubeRay(Document):
    """The Ray operator."""

    chart: Chart
    """The operator."""
    image: str = ""
    """The operator's image where the chart's own cannot be pulled (a test bed)."""
    cpu: Cores = 2.0
    """Cores of the operator."""
    memory: ByteSize = 4 * 2**30
    """Memory of the operator."""


class Redis(Document):
    """Where the shared services' Ray head keeps its state, so that its restart loses nothing."""

    address: str
    """HOST:PORT."""
    password_secret: str = ""
    """Kubernetes secret with the key `password`; empty: no password."""


class SharedRay(Document):
    """The long-lived Ray cluster of shared services."""

    image: Image
    """The services' image."""
    ray_version: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    """Version of Ray in the image."""
    head_cpu: Cores = 8.0
    """Cores of the head."""
    head_memory: ByteSize = 32 * 2**30
    """Memory of the head."""
    redis: Redis | None = None
    """Where the head keeps its state; default: nowhere, a restarted head starts the services again."""
    services: dict[Name, ServiceConfig] = Field(min_length=1)
    """Services by name, which experiments refer to with `shared: true`."""
    manifest: str = ""
    """URI of the manifest of the dataset that services load before they answer; {bucket} stands for the region's
    bucket. Default: they load what a call names.
    """
    first_port: int = Field(default=7200, ge=1024, le=65000)
    """Port of the first replica; the others follow."""
    token_secret: str = ""
    """Kubernetes Secret with the key `token`, which replicas and experiments prove to each other to have. Default: none
    is needed, and only the network policy keeps others out.
    """


class Health(Document):
    """What is done about sick GPUs."""

    watch_xid: bool = True
    """Alert on the node condition that GKE sets for GPU errors."""
    critical_xids: list[int] = [48, 63, 64, 79, 119, 120, 123, 140]
    """Errors that make a GPU unusable until it is reset."""
    own_exporter: bool = False
    """A DCGM exporter of your own is collected too, with the fields that GKE's leaves out: then alerts on errors of GPU
    memory, of NVLink and on each XID are of use. Without it the node condition stands for them.
    """
    cordon: bool = True
    """The health controller may keep new pods off such nodes."""
    alert_after: Seconds = 60.0
    """How long a condition lasts before somebody is told."""
    max_temperature_celsius: int = Field(default=87, ge=50, le=110)
    """GPU temperature above which somebody is told."""
    min_clock_mhz: int = Field(default=1000, ge=100, le=3000)
    """Clock of a busy GPU below which it is taken to throttle."""


class Mount(Document):
    """A folder of the nodes that every pod of an experiment sees."""

    name: Name
    """Name of the volume."""
    host_path: str
    """On the node; $NAME is taken from the environment."""
    mount_path: str
    """In the pod; $NAME is taken from the environment."""
    read_only: bool = True
    """Pods cannot write there."""


class SiteConfig(Document):
    """What every pod of an experiment gets besides its image; published with the facts."""

    image: str = ""
    """Image where an experiment names none."""
    bucket_env: dict[str, str] = {}
    """Environment with which the bucket is reached; not secret."""
    bucket_secret: str = ""
    """Secret of each namespace whose keys become environment; empty where the pod's identity is enough."""
    mounts: list[Mount] = []
    """Folders of the node."""
    service_account: str = "gkr-experiment"
    """Service account that has the bucket's rights."""
    cpu_request_share: float = Field(default=1.0, gt=0, le=1)
    """Part of the planned cores that pods request; below 1 where many share one machine (a test bed)."""
    image_pull_secrets: list[str] = []
    """Secrets for pulling images."""


class PlatformStack(StackBase):
    """One cluster's platform."""

    kind: Literal["platform"]
    """Kind of stack."""
    region_stack: StackText
    """The region stack it builds on."""
    namespaces: list[Name] = Field(default=["gkr-0", "gkr-1"], min_length=1)
    """Namespaces of experiments; learners of one experiment take them in turn."""
    installers: Installers = Installers()
    """What prepares GPU nodes."""
    kueue: Kueue
    """Queues."""
    kuberay: KubeRay
    """The Ray operator."""
    shared: SharedRay | None = None
    """Shared services; default: none."""
    health: Health = Health()
    """What is done about sick GPUs."""
    site: SiteConfig = SiteConfig()
    """What every pod gets."""
