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


class SyncerPorts(Record):
    """Where pods of a syncer listen."""

    control_port: int
    bulk_port: int


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
    namespace: str = "default"

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
