"""The machine catalogue: one row per machine drives placement, rendering, infrastructure and MFU.

GPU types are exact tokens: H100 (A3 High) and H100-MEGA (A3 Mega) are different machines with different fabrics, and
neither is a prefix match of the other. Sizes of GPU machines: Google's machine pages; allocatable CPU and memory leave
room for the fabric's sidecar and daemons. Boot disks, capacity, versions and packet sizes: Google's AI Hypercomputer
pages for GKE, the Cluster Toolkit and the provider's documents, as the reference note on A3 machines cites them. A3
High has no floor there, and its packet size is that of A3 Mega's GPU networks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from spec.problems import RemedyError, did_you_mean

Fabric = Literal["none", "tcpx", "tcpxo", "rdma", "rdma-nvlink72"]


@dataclass(frozen=True)
class Machine:
    """One row."""

    name: str
    """Our word for it, such as a3-ultra."""
    machine_type: str
    """The cloud's word for it."""
    cpus: int
    memory_gib: int
    allocatable_cpu: float
    """Cores a node's pods may ask for in total."""
    allocatable_memory_gib: int
    """Memory a node's pods may ask for in total."""
    gpu: str | None = None
    """Token that people write, such as H200."""
    gpus: int = 0
    accelerator: str = ""
    """Guest accelerator type, and the value of the label cloud.google.com/gke-accelerator."""
    gpu_memory_gb: int = 0
    """Of one GPU, in 10^9 bytes."""
    peak_bf16_flops: float | None = None
    """Dense bfloat16 FLOP/s of one GPU, for MFU."""
    nics: int = 1
    """Physical NICs."""
    extra_networks: int = 0
    """Networks of a node pool besides the primary one."""
    max_gbps: int = 0
    fabric: Fabric = "none"
    local_ssds: int = 0
    """Local SSDs of 375 GiB."""
    boot_disks: tuple[str, ...] = ("pd-balanced", "pd-ssd")
    """Kinds of boot disk that it takes, the default first."""
    on_demand: bool = True
    """Whether it can be had without a reservation, spot or flex-start."""
    gke_floor: str = ""
    """Oldest GKE version with which its fabric is known to work."""
    fabric_mtu: int = 0
    """Largest packet on the fabric's networks."""
    unsupported: str = ""
    """Why it cannot be asked for; empty if it can."""
    oversubscribable: bool = False
    """Several nodes share one real machine (the local backend's stand-ins): CPU is shared, memory is summed."""

    @property
    def allocatable_memory(self) -> int:
        """The same in bytes."""
        return self.allocatable_memory_gib * 2**30

    @property
    def labels(self) -> dict[str, str]:
        """Node labels that select this machine."""
        labels = {"node.kubernetes.io/instance-type": self.machine_type}
        if self.accelerator:
            labels["cloud.google.com/gke-accelerator"] = self.accelerator
        return labels

    @property
    def gpu_nics(self) -> int:
        """NICs that carry GPU-to-GPU traffic."""
        return {"none": 0, "tcpx": 4, "tcpxo": 8, "rdma": 8, "rdma-nvlink72": 4}[self.fabric]


CATALOGUE: tuple[Machine, ...] = (
    Machine(
        name="a3-mega", machine_type="a3-megagpu-8g", gpu="H100-MEGA", gpus=8, accelerator="nvidia-h100-mega-80gb",
        cpus=208, memory_gib=1872, allocatable_cpu=200, allocatable_memory_gib=1700, gpu_memory_gb=80,
        peak_bf16_flops=989.4e12, nics=9, extra_networks=8, max_gbps=1800, fabric="tcpxo", local_ssds=16,
        gke_floor="1.32.11-gke.1174000", fabric_mtu=8244,
    ),
    Machine(
        name="a3-ultra", machine_type="a3-ultragpu-8g", gpu="H200", gpus=8, accelerator="nvidia-h200-141gb",
        cpus=224, memory_gib=2952, allocatable_cpu=220, allocatable_memory_gib=2800, gpu_memory_gb=141,
        peak_bf16_flops=989.4e12, nics=10, extra_networks=9, max_gbps=3600, fabric="rdma", local_ssds=32,
        boot_disks=("hyperdisk-balanced",), on_demand=False, gke_floor="1.33.0-gke.0", fabric_mtu=8896,
    ),
    Machine(
        name="a3-high", machine_type="a3-highgpu-8g", gpu="H100", gpus=8, accelerator="nvidia-h100-80gb",
        cpus=208, memory_gib=1872, allocatable_cpu=200, allocatable_memory_gib=1700, gpu_memory_gb=80,
        peak_bf16_flops=989.4e12, nics=5, extra_networks=4, max_gbps=1000, fabric="tcpx", local_ssds=16,
        fabric_mtu=8244,
    ),
    Machine(
        name="a4", machine_type="a4-highgpu-8g", gpu="B200", gpus=8, accelerator="nvidia-b200",
        cpus=224, memory_gib=3968, allocatable_cpu=220, allocatable_memory_gib=3700, gpu_memory_gb=180,
        peak_bf16_flops=2250e12, nics=10, extra_networks=9, max_gbps=3600, fabric="rdma", local_ssds=32,
        boot_disks=("hyperdisk-balanced",), on_demand=False, gke_floor="1.32.2-gke.1475000", fabric_mtu=8896,
    ),
    Machine(
        name="a4x", machine_type="a4x-highgpu-4g", gpu="GB200", gpus=4, accelerator="nvidia-gb200",
        cpus=140, memory_gib=884, allocatable_cpu=136, allocatable_memory_gib=820, gpu_memory_gb=186,
        peak_bf16_flops=2500e12, nics=6, extra_networks=5, max_gbps=2000, fabric="rdma-nvlink72", local_ssds=32,
        unsupported="A4X needs Arm images, DRA and IMEX, which are not built yet",
    ),
    Machine(
        name="n2-standard-8", machine_type="n2-standard-8", cpus=8, memory_gib=32, allocatable_cpu=7,
        allocatable_memory_gib=26, max_gbps=16,
    ),
    Machine(
        name="n2-standard-32", machine_type="n2-standard-32", cpus=32, memory_gib=128, allocatable_cpu=30,
        allocatable_memory_gib=112, max_gbps=32,
    ),
    Machine(
        name="local-cpu", machine_type="local", cpus=0, memory_gib=0, allocatable_cpu=0, allocatable_memory_gib=0,
        oversubscribable=True,
    ),
)  # fmt: skip
"""All rows. `local-cpu` has no size of its own: the facts of the local backend carry the real machine's."""


def machine(name: str) -> Machine:
    """The row of that name; a plan or facts that name another are of a newer version, and a KeyError says so."""
    for one in CATALOGUE:
        if name in (one.name, one.machine_type):
            return one
    raise KeyError(f"machine {name!r} is not in the catalogue: {', '.join(one.name for one in CATALOGUE)}")


def machine_of_gpu(gpu: str) -> Machine | None:
    """The row whose GPU has exactly this token."""
    return next((one for one in CATALOGUE if one.gpu == gpu), None)


def gpu_tokens() -> list[str]:
    """All GPU types that can be asked for."""
    return [one.gpu for one in CATALOGUE if one.gpu and not one.unsupported]


@dataclass(frozen=True)
class GpuRequest:
    """`H200:8`, parsed."""

    gpu: str
    count: int

    def __str__(self) -> str:
        return f"{self.gpu}:{self.count}"


def parse_gpu(text: str) -> GpuRequest:
    """GPU type and count per node; the type must be a supported row of the catalogue."""
    match = re.fullmatch(r"(?P<gpu>[A-Za-z][A-Za-z0-9-]*)(?::(?P<count>[0-9]+))?", text)
    if match is None or (match["count"] is not None and int(match["count"]) == 0):
        raise RemedyError(
            f'"{text}" is not GPUTYPE:COUNT with a whole count above zero', hint="write for example H200:8"
        )
    row = machine_of_gpu(match["gpu"])
    if row is None:
        hint = did_you_mean(match["gpu"], gpu_tokens(), noun="GPU types")
        raise RemedyError(
            f'GPU type "{match["gpu"]}" is not in the machine catalogue ({", ".join(gpu_tokens())})', hint=hint
        )
    if row.unsupported:
        raise RemedyError(
            f'GPU type "{match["gpu"]}" is not supported: {row.unsupported}',
            hint=f"use one of {', '.join(gpu_tokens())}",
        )
    if match["count"] is None:
        raise RemedyError(f'"{text}" has no count', hint=f"write {match['gpu']}:{row.gpus} for all GPUs of a node")
    return GpuRequest(match["gpu"], int(match["count"]))


def _check_gpu(text: str) -> str:
    parse_gpu(text)
    return text


GpuText = Annotated[
    str,
    AfterValidator(_check_gpu),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": "^[A-Za-z][A-Za-z0-9-]*:[1-9][0-9]*$",
            "description": "GPU type and count per node, such as H200:8",
        }
    ),
]
"""`H200:8`; the type is in the catalogue."""
