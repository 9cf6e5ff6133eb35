"""Which cluster holds a learner, and on which machines.

Pure bookkeeping over facts: nodes taken by one learner are not offered to the next. A node of a group is a whole
machine; only the local backend's stand-ins share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spec.experiment import ANY, GroupConfig, PlacedLearner
from spec.facts import ClusterFacts, MachinePool
from spec.machines import GpuRequest, machine_of_gpu, parse_gpu
from spec.names import node_name
from spec.nodes import Path
from spec.plan import NodePlan
from spec.problems import did_you_mean
from spec.refusals import Refusal
from spec.units import format_bytes

DEFAULT_CPU = 1.0
DEFAULT_MEMORY = 2 * 2**30
SHM_SHARE = 4
"""Shared memory by default: this part of memory."""
_MIB = 2**20


@dataclass
class Usage:
    """What earlier learners took: nodes by cluster and pool."""

    nodes: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def free(self, facts: ClusterFacts, index: int) -> int:
        return facts.pools[index].nodes - self.nodes.get((facts.name, index), 0)

    def copy(self) -> Usage:
        return Usage(dict(self.nodes))


@dataclass(frozen=True)
class Placement:
    """A learner in its cluster."""

    learner: PlacedLearner
    facts: ClusterFacts
    gpu: str | None
    nodes: list[NodePlan]
    usage: Usage


def place(
    learner: PlacedLearner, *, facts: Sequence[ClusterFacts], usage: Usage
) -> tuple[Placement | None, list[Refusal]]:
    """The first cluster in the order of preference that can hold the learner, or why none can."""
    by_name = {one.name: one for one in facts}
    wanted = [one.name for one in facts] if ANY in learner.config.cluster else learner.config.cluster
    refusals = [
        _unknown_cluster(learner, index, name, by_name) for index, name in enumerate(wanted) if name not in by_name
    ]
    reasons: dict[str, list[Refusal]] = {}
    for name in wanted:
        if name not in by_name:
            continue
        placement, why_not = _fit(learner, facts=by_name[name], usage=usage.copy(), others=facts)
        if placement is not None:
            return placement, refusals
        reasons[name] = why_not
    if not wanted:
        return None, [
            Refusal(
                learner.cluster_path, "no cluster is known", hint="log in to one, or use the local backend: local-0"
            )
        ]
    if len(reasons) == 1:
        return None, [*refusals, *next(iter(reasons.values()))]
    if reasons:
        each = "; ".join(f"{name}: {why[0].message}" for name, why in reasons.items())
        refusals.append(
            Refusal(
                learner.cluster_path,
                f"no cluster can hold learner {learner.name}: {each}",
                hint="ask for less, or wait",
            )
        )
    return None, refusals


def _unknown_cluster(learner: PlacedLearner, index: int, name: str, known: Mapping[str, ClusterFacts]) -> Refusal:
    hint = did_you_mean(name, known, noun="clusters") or "no cluster is known; log in to one"
    return Refusal((*learner.cluster_path, index), f'there is no cluster "{name}"', hint=hint)


def _fit(
    learner: PlacedLearner, *, facts: ClusterFacts, usage: Usage, others: Sequence[ClusterFacts]
) -> tuple[Placement | None, list[Refusal]]:
    nodes: list[NodePlan] = []
    refusals: list[Refusal] = []
    gpu: str | None = None
    for index, group in enumerate(learner.config.groups):
        path = learner.group_path(index)
        request = parse_gpu(group.resources.gpu) if group.resources.gpu else None
        gpu = gpu or (request.gpu if request else None)
        pools = _pools(facts, request)
        if not pools:
            refusals.append(_no_such_machine(facts, request, path, others))
            continue
        fitting, problems = _fitting(group, request=request, facts=facts, pools=pools, path=path)
        if problems:
            refusals.extend(problems)
            continue
        taken = _take(group, facts=facts, pools=fitting, usage=usage)
        if len(taken) < group.nodes:
            refusals.append(_too_few(group, facts=facts, pools=fitting, free=len(taken), path=path))
            continue
        nodes.extend(
            _node(group, request=request, pool=facts.pools[pool], index=number) for number, pool in enumerate(taken)
        )
    if refusals:
        return None, refusals
    return Placement(learner, facts, gpu, nodes, usage), []


def _pools(facts: ClusterFacts, request: GpuRequest | None) -> list[int]:
    return [index for index, pool in enumerate(facts.pools) if pool.row.gpu == (request.gpu if request else None)]


def _no_such_machine(
    facts: ClusterFacts, request: GpuRequest | None, path: Path, others: Sequence[ClusterFacts]
) -> Refusal:
    has = ", ".join(facts.gpu_types()) or "no GPUs"
    if request is None:
        return Refusal(
            (*path, "resources"),
            f"cluster {facts.name} has no CPU machines for this group",
            hint=f"it has {has}",
            key=True,
        )
    elsewhere = [one.name for one in others if request.gpu in one.gpu_types()]
    hint = f"{facts.name} has {has}" + (f"; {request.gpu} is in {', '.join(elsewhere)}" if elsewhere else "")
    return Refusal((*path, "resources", "gpu"), f"cluster {facts.name} has no {request.gpu}", hint=hint)


def _fitting(
    group: GroupConfig, *, request: GpuRequest | None, facts: ClusterFacts, pools: list[int], path: Path
) -> tuple[list[int], list[Refusal]]:
    """Pools whose nodes are large enough for one node of the group."""
    fitting: list[int] = []
    for index in pools:
        cpu, memory, _ = _sizes(group, request=request, pool=facts.pools[index])
        if cpu <= facts.pools[index].node_cpu and memory <= facts.pools[index].node_memory:
            fitting.append(index)
    if fitting:
        return fitting, []
    largest = max((facts.pools[index] for index in pools), key=lambda one: (one.node_memory, one.node_cpu))
    cpu, memory, _ = _sizes(group, request=request, pool=largest)
    problems: list[Refusal] = []
    if cpu > largest.node_cpu:
        message = f"asks for {cpu:g} cores per node, one {largest.machine} of {facts.name} offers {largest.node_cpu:g}"
        problems.append(Refusal((*path, "resources", "cpu"), message, hint=f"at most cpu: {largest.node_cpu:g}"))
    if memory > largest.node_memory:
        most = format_bytes(largest.node_memory)
        message = (
            f"asks for {format_bytes(memory)} of memory per node, one {largest.machine} of {facts.name} offers {most}"
        )
        problems.append(Refusal((*path, "resources", "memory"), message, hint=f"at most memory: {most}"))
    return [], problems


def _take(group: GroupConfig, *, facts: ClusterFacts, pools: list[int], usage: Usage) -> list[int]:
    taken: list[int] = []
    for index in pools:
        count = min(group.nodes - len(taken), usage.free(facts, index))
        taken.extend([index] * max(0, count))
        usage.nodes[facts.name, index] = usage.nodes.get((facts.name, index), 0) + max(0, count)
    return taken


def _too_few(group: GroupConfig, *, facts: ClusterFacts, pools: list[int], free: int, path: Path) -> Refusal:
    total = sum(facts.pools[index].nodes for index in pools)
    machines = ", ".join(dict.fromkeys(facts.pools[index].machine for index in pools))
    rest = "" if free == total else f", of which {free} are left beside the rest of this experiment"
    message = f"asks for {group.nodes} nodes of {machines}, cluster {facts.name} has {total}{rest}"
    return Refusal(
        (*path, "nodes"),
        message,
        hint=f"at most nodes: {free}, or another cluster" if free else "choose another cluster",
    )


def _sizes(group: GroupConfig, *, request: GpuRequest | None, pool: MachinePool) -> tuple[float, int, int]:
    """Cores, memory and shared memory of one node, defaults filled in."""
    resources = group.resources
    row = machine_of_gpu(request.gpu) if request else None
    share = min(1.0, request.count / row.gpus) if request and row else None
    cpu = resources.cpu if resources.cpu is not None else DEFAULT_CPU if share is None else pool.node_cpu * share
    memory = resources.memory
    if memory is None:
        memory = DEFAULT_MEMORY if share is None else int(pool.node_memory * share) // _MIB * _MIB
    shm = resources.shm if resources.shm is not None else memory // SHM_SHARE // _MIB * _MIB
    return cpu, memory, shm


def _node(group: GroupConfig, *, request: GpuRequest | None, pool: MachinePool, index: int) -> NodePlan:
    cpu, memory, shm = _sizes(group, request=request, pool=pool)
    return NodePlan(
        name=node_name(group.name, index=index),
        group=group.name,
        machine=pool.machine,
        ranks=group.ranks_per_node,
        gpus=request.count if request else 0,
        cpu=cpu,
        memory=memory,
        shm=shm,
    )
