"""GPUs and nodes of a cluster: how many, free, used and broken, in which place, and who holds them; pure.

Total = free + used + broken: a GPU counts as used while a pod holds it, even on a node that takes no more pods; the
other GPUs of such a node count as broken, for nobody can get them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gkr.cluster.explain_objects import (
    GPU,
    Object,
    condition,
    ended,
    holder,
    labels,
    name,
    node_of,
    pod_gpus,
    quantity,
    spec,
    status,
    sub,
)
from spec.machines import CATALOGUE, Machine

_PLACE = "cloud.google.com/gce-topology-"
_ACCELERATOR = "cloud.google.com/gke-accelerator"
_OTHER_ACCELERATORS = ("nvidia.com/gpu.product", "gpu.nvidia.com/class")
_TYPE = "node.kubernetes.io/instance-type"
_BY_ACCELERATOR: Mapping[str, Machine] = {row.accelerator: row for row in CATALOGUE if row.accelerator}
_BY_TYPE: Mapping[str, Machine] = {row.machine_type: row for row in CATALOGUE}


@dataclass(frozen=True)
class Node:
    """One machine of a cluster."""

    name: str
    machine: str
    """Row of the catalogue, else the cloud's word for it."""
    gpu: str
    """Token of its GPU type, else the label's value; empty without GPUs."""
    gpus: int
    """What pods may ask for; on a broken node what the catalogue promises, if that is more."""
    used: int
    state: str
    """`ready`, or what is wrong with it."""
    zone: str = ""
    block: str = ""
    subblock: str = ""
    holders: Mapping[str, int] = field(default_factory=dict[str, int])
    """Who -> GPUs."""
    pods: int = 0

    @property
    def usable(self) -> bool:
        """New pods can be placed on it."""
        return self.state == "ready"

    @property
    def free(self) -> int:
        """GPUs that a new pod can get."""
        return max(0, self.gpus - self.used) if self.usable else 0

    @property
    def broken(self) -> int:
        """GPUs that nobody holds and nobody can get."""
        return 0 if self.usable else max(0, self.gpus - self.used)

    @property
    def place(self) -> str:
        """Topology block and sub-block."""
        return "/".join(filter(None, (self.block, self.subblock.removeprefix(f"{self.block}-"))))


@dataclass(frozen=True)
class GpuType:
    """All GPUs of one type in a cluster."""

    gpu: str
    nodes: int
    total: int
    free: int
    used: int
    broken: int
    per_node: int
    """GPUs of a whole node."""
    free_nodes: int
    """Nodes whose GPUs are all free."""
    largest_on_node: int
    """The most GPUs that are free on one node."""
    largest_in_subblock: int
    """The most GPUs that are free within one topology sub-block; 0 without a topology."""
    subblock: str
    """The sub-block that has them."""
    holders: Mapping[str, int]
    """Who -> GPUs, most first."""
    broken_nodes: Mapping[str, str]
    """Node -> what is wrong."""


def read_nodes(nodes: Iterable[Object], *, pods: Iterable[Object]) -> list[Node]:
    """Nodes with what their pods hold, by name in natural order."""
    held: dict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    for pod in pods:
        node = node_of(pod)
        if not node or ended(pod):
            continue
        counts[node] += 1
        gpus = pod_gpus(spec(pod))
        if gpus:
            held[node][holder(pod)] += gpus
    found = [_node(one, held=held.get(name(one), {}), pods=counts[name(one)]) for one in nodes]
    return sorted(found, key=lambda node: _natural(node.name))


def _node(one: Object, *, held: Mapping[str, int], pods: int) -> Node:
    own = labels(one)
    row = _BY_ACCELERATOR.get(own.get(_ACCELERATOR, "")) or _BY_TYPE.get(own.get(_TYPE, ""))
    offered = int(quantity(sub(status(one), "allocatable").get(GPU)))
    promised = row.gpus if row else 0
    label = own.get(_ACCELERATOR) or next((own[key] for key in _OTHER_ACCELERATORS if key in own), "")
    has_gpus = bool(offered or promised or label)
    state = _state(one, offered=offered, promised=promised)
    return Node(
        name=name(one),
        machine=row.name if row else own.get(_TYPE, ""),
        gpu=(row.gpu if row and row.gpu else label or "gpu") if has_gpus else "",
        gpus=offered if state == "ready" else max(offered, promised),
        used=sum(held.values()),
        state=state,
        zone=own.get("topology.kubernetes.io/zone", ""),
        block=own.get(f"{_PLACE}block", ""),
        subblock=own.get(f"{_PLACE}subblock", ""),
        holders=dict(sorted(held.items(), key=lambda item: -item[1])),
        pods=pods,
    )


def _state(one: Object, *, offered: int, promised: int) -> str:
    readiness = condition(one, "Ready")
    if readiness is None or readiness.get("status") != "True":
        return f"not ready ({sub(readiness).get('reason') or 'no status'})"
    if spec(one).get("unschedulable"):
        return "cordoned"
    if offered < promised:
        return f"offers {offered} of {promised} GPUs"
    return "ready"


def gpu_types(nodes: Sequence[Node]) -> list[GpuType]:
    """GPUs by type, in the order of the names."""
    by_type: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.gpu:
            by_type[node.gpu].append(node)
    return [_gpu_type(gpu, members) for gpu, members in sorted(by_type.items())]


def _gpu_type(gpu: str, nodes: Sequence[Node]) -> GpuType:
    holders: Counter[str] = Counter()
    subblocks: Counter[str] = Counter()
    for node in nodes:
        holders.update(node.holders)
        if node.subblock:
            subblocks[node.place] += node.free
    best = max(subblocks.items(), key=lambda item: item[1], default=("", 0))
    return GpuType(
        gpu=gpu,
        nodes=len(nodes),
        total=sum(max(node.gpus, node.used) for node in nodes),
        free=sum(node.free for node in nodes),
        used=sum(node.used for node in nodes),
        broken=sum(node.broken for node in nodes),
        per_node=max(node.gpus for node in nodes),
        free_nodes=sum(node.usable and node.free == node.gpus > 0 for node in nodes),
        largest_on_node=max(node.free for node in nodes),
        largest_in_subblock=best[1],
        subblock=best[0] if best[1] else "",
        holders=dict(holders.most_common()),
        broken_nodes={node.name: node.state for node in nodes if not node.usable},
    )


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    """`node-2` before `node-10`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in text.replace("-", " - ").split())


def gpu_token(label: str) -> str:
    """Our word for the value of an accelerator label; the value itself if the catalogue does not have it."""
    row = _BY_ACCELERATOR.get(label)
    return row.gpu if row and row.gpu else label


ACCELERATOR_LABELS = (_ACCELERATOR, *_OTHER_ACCELERATORS)
"""Node labels that name a GPU type."""
