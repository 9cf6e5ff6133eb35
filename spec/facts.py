"""What a deployed region tells the rest: what can be asked of its cluster, and where its things are.

Published by the platform stack (or, on a laptop, made by `local_facts`); read leniently. Only data: no client, no
credential.
"""

from __future__ import annotations

from typing import Literal

from spec.base import Record
from spec.machines import Machine, machine
from spec.services import ServiceKind
from spec.units import StoredBytes


class MachinePool(Record):
    """Equal machines of one cluster."""

    name: str = ""
    machine: str
    """Row of the machine catalogue."""
    nodes: int
    cpu: float | None = None
    """Cores a node offers, where they differ from the catalogue's."""
    memory: StoredBytes | None = None
    """Memory a node offers, where it differs from the catalogue's."""

    @property
    def row(self) -> Machine:
        return machine(self.machine)

    @property
    def node_cpu(self) -> float:
        return self.cpu if self.cpu is not None else self.row.allocatable_cpu

    @property
    def node_memory(self) -> int:
        return self.memory if self.memory is not None else self.row.allocatable_memory


class SharedService(Record):
    """A long-lived service of the platform."""

    kind: ServiceKind
    endpoints: list[str]
    secret: str = ""
    """Secret of each namespace of experiments: its `token` is what replicas and clients prove to each other to have.
    Empty: nothing is proved, and only the network policy keeps others out."""


class SyncerPorts(Record):
    """Where pods of a syncer listen."""

    control_port: int
    bulk_port: int
    host: str = ""
    """Address at which pods of other regions reach a syncer of this cluster; empty: none does."""
    routed: bool = False
    """The platform brings what arrives at `host` to the syncer; else the syncer's own Service claims the address."""


class HostMount(Record):
    """A folder of the node that every pod of an experiment sees."""

    name: str
    host_path: str
    mount_path: str
    read_only: bool = True


class Site(Record):
    """What a cluster gives every pod of an experiment besides its image."""

    image: str = ""
    """Image, by name in the registry or in full, where the experiment names none."""
    bucket_env: dict[str, str] = {}
    """Environment with which the bucket is reached, such as AWS_ENDPOINT_URL; not secret."""
    bucket_secret: str = ""
    """Secret of each namespace whose keys become environment; empty where the pod's identity is enough."""
    mounts: list[HostMount] = []
    service_account: str = ""
    """Service account that has the bucket's rights; empty: one is made for each experiment, without any right."""
    cpu_request_share: float = 1.0
    """Part of the planned cores that pods request; below 1 where many share one machine (a test bed)."""
    topology_level: str = ""
    """Node label of the level in which the nodes of a group are placed together if they fit; empty: no topology."""
    image_pull_secrets: list[str] = []


class ClusterFacts(Record):
    """One cluster."""

    version: Literal[1] = 1
    name: str
    region: str
    backend: Literal["local", "kubernetes"]
    pools: list[MachinePool]
    bucket: str
    """URI of the region's bucket, without a slash at the end."""
    registry: str = ""
    """Prefix of images given by name."""
    queues: list[str] = []
    priorities: list[str] = ["low", "normal", "high"]
    services: dict[str, SharedService] = {}
    """Shared services by name."""
    syncer: SyncerPorts | None = None
    """None on the local backend, where the syncer binds what it gets."""
    namespaces: list[str] = ["default"]
    """Namespaces of experiments; learners of one experiment take them in turn."""
    site: Site = Site()

    def gpu_types(self) -> list[str]:
        """GPU types this cluster has, in the order of its pools."""
        return list(dict.fromkeys(pool.row.gpu for pool in self.pools if pool.row.gpu))


def local_facts(cores: float, *, memory_bytes: int, bucket_root_uri: str, count: int = 2) -> list[ClusterFacts]:
    """`local-0`, `local-1`, ...: each stands for a region, all are this one machine."""
    return [
        ClusterFacts(
            name=f"local-{index}",
            region=f"local-{index}",
            backend="local",
            pools=[MachinePool(name="local", machine="local-cpu", nodes=LOCAL_NODES, cpu=cores, memory=memory_bytes)],
            bucket=f"{bucket_root_uri.rstrip('/')}/local-{index}",
        )
        for index in range(count)
    ]


LOCAL_NODES = 16
"""Stand-ins for nodes that one local cluster offers; their memory together must still fit the machine."""
