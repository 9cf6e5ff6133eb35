"""Which learner's cluster hosts which service, with what.

`encode` is hosted by every learner, because its traffic is on the way of a step and must stay in the region; `sample`
and `evaluate` by the first learner, whose driver evaluates the merged model. `learner:` overrides both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from spec.experiment import Experiment
from spec.machines import machine_of_gpu, parse_gpu
from spec.placement import Placement
from spec.plan import ServicePlan
from spec.problems import did_you_mean
from spec.refusals import Refusal
from spec.services import ServiceConfig
from spec.units import format_bytes

DEFAULT_CPU = 1.0
DEFAULT_MEMORY = 2**30
MOST_QUEUE_BYTES = 64 * 2**20
"""Of one rank, unless the file says otherwise."""
MODEL_KINDS = ("encode", "evaluate")
"""Those that serve weights which lie in a folder; `sample` is told with each call."""
SHARED_CLIENTS = 256
"""Ranks for which a shared replica has room at least; who they will be is not known when it starts."""


def model_of(service: ServiceConfig, *, bucket: str) -> str:
    """Where its weights are in the region of that bucket; empty if it ships with them."""
    return (service.model or "").replace("{bucket}", bucket.rstrip("/"))


def queue_budget(memory: int) -> int:
    """Bytes of a replica's memory that requests without an answer may take together."""
    return memory // 2


def queue_share(memory: int, *, clients: int) -> int:
    """What one client of so many may have of them."""
    return max(1, queue_budget(memory) // clients)


@dataclass
class ServicePlacement:
    """Service plans by learner, and what was found on the way."""

    by_learner: dict[str, list[ServicePlan]] = field(default_factory=dict[str, list[ServicePlan]])
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    warnings: list[str] = field(default_factory=list[str])


def place_services(experiment: Experiment, *, placements: Sequence[Placement]) -> ServicePlacement:
    """All services of the experiment."""
    result = ServicePlacement({one.learner.name: [] for one in placements})
    for name, service in experiment.services.items():
        for placement in _hosts(service, placements):
            if service.shared:
                plan = _shared(name, service, placement=placement, result=result)
            else:
                plan = _private(name, service, placement=placement, placements=placements, result=result)
            if plan is not None:
                result.by_learner[placement.learner.name].append(plan)
    for placement in placements:
        _check_gpus(experiment, placement, result)
    return result


def _hosts(service: ServiceConfig, placements: Sequence[Placement]) -> Sequence[Placement]:
    if service.learner is not None:
        return [one for one in placements if one.learner.name == service.learner]
    return placements if service.kind == "encode" else placements[:1]


def _shared(name: str, service: ServiceConfig, *, placement: Placement, result: ServicePlacement) -> ServicePlan | None:
    result.refusals.extend(_wrong_model(name, service))
    facts = placement.facts
    of_kind = {known: one for known, one in facts.services.items() if one.kind == service.kind}
    own = name if name in of_kind or len(of_kind) != 1 else next(iter(of_kind))
    found = of_kind.get(own)
    if found is None or not found.endpoints:
        state = "has no endpoint" if found else f"is not among those of {facts.name}"
        hint = (
            did_you_mean(name, of_kind, noun=f"shared services of kind {service.kind}")
            or "remove shared: true to start a private one"
        )
        message = f"shared service {name} of kind {service.kind} {state}"
        result.refusals.append(Refusal(("services", name, "shared"), message, hint=hint))
        return None
    return ServicePlan(
        name=name, kind=service.kind, replicas=len(found.endpoints), cpu=0.0, memory=0, queue_depth=service.queue_depth,
        max_batch=service.max_batch, shared_endpoints=found.endpoints, shared_secret=found.secret,
        answers_to="" if own == name else own,
    )  # fmt: skip


def _private(
    name: str,
    service: ServiceConfig,
    *,
    placement: Placement,
    placements: Sequence[Placement],
    result: ServicePlacement,
) -> ServicePlan | None:
    resources = service.resources
    cpu = resources.cpu if resources.cpu is not None else DEFAULT_CPU
    memory = resources.memory if resources.memory is not None else DEFAULT_MEMORY
    problems = _too_large(name, cpu=cpu, memory=memory, placement=placement) + _wrong_model(name, service)
    clients = 1 + sum(node.ranks for node in placement.nodes)  # the ranks, and the driver that evaluates
    share = queue_share(memory, clients=clients)
    if service.queue_bytes is not None and service.queue_bytes > share:
        message = (
            f"{clients} clients of {name} with {format_bytes(service.queue_bytes)} each may fill more than half of a"
            f" replica's {format_bytes(memory)}"
        )
        needed = (
            f"queue_bytes: {share // 1024}Ki, or resources.memory of {format_bytes(2 * clients * service.queue_bytes)}"
        )
        problems.append(Refusal(("services", name, "queue_bytes"), message, hint=f"at most {needed}"))
    gpu = _gpu_type(name, service, placement=placement, placements=placements, result=result, problems=problems)
    result.refusals.extend(problems)
    if problems:
        return None
    return ServicePlan(
        name=name, kind=service.kind, replicas=service.replicas, cpu=cpu, memory=memory,
        gpus=parse_gpu(resources.gpu).count if resources.gpu else 0, gpu=gpu, queue_depth=service.queue_depth,
        max_batch=service.max_batch, queue_bytes=service.queue_bytes or min(MOST_QUEUE_BYTES, share),
        max_delay_ms=service.max_delay_ms, model=model_of(service, bucket=placement.facts.bucket),
    )  # fmt: skip


def _wrong_model(name: str, service: ServiceConfig) -> list[Refusal]:
    path = ("services", name, "model")
    if service.model is None:
        return []
    if service.shared:
        message = f"service {name} is the platform's, which serves the model of its own stack"
        return [Refusal(path, message, hint="remove model, or shared: true to start a private one")]
    if service.kind not in MODEL_KINDS:
        message = f"service {name} of kind {service.kind} takes no model"
        return [Refusal(path, message, hint=f"remove it; only {' and '.join(MODEL_KINDS)} have one")]
    unknown = re.search(r"\{(?!bucket\})[^}]*\}?", service.model)
    if unknown:
        message = f"{unknown.group()} is not a placeholder"
        return [Refusal(path, message, hint="{bucket} is the only one")]
    return []


def _too_large(name: str, *, cpu: float, memory: int, placement: Placement) -> list[Refusal]:
    pools = placement.facts.pools
    most_cpu, most_memory = max(one.node_cpu for one in pools), max(one.node_memory for one in pools)
    found: list[Refusal] = []
    path = ("services", name, "resources")
    if cpu > most_cpu:
        message = (
            f"a replica of {name} asks for {cpu:g} cores, the largest machine of {placement.facts.name} offers "
            f"{most_cpu:g}"
        )
        found.append(Refusal((*path, "cpu"), message, hint=f"at most cpu: {most_cpu:g}"))
    if memory > most_memory:
        most = format_bytes(most_memory)
        message = (
            f"a replica of {name} asks for {format_bytes(memory)}, the largest machine of {placement.facts.name} "
            f"offers {most}"
        )
        found.append(Refusal((*path, "memory"), message, hint=f"at most memory: {most}"))
    return found


def _gpu_type(
    name: str,
    service: ServiceConfig,
    *,
    placement: Placement,
    placements: Sequence[Placement],
    result: ServicePlacement,
    problems: list[Refusal],
) -> str | None:
    """The GPU type of a replica: the learner's own, because a learner has one GPU type."""
    if service.resources.gpu is None:
        return None
    wanted = parse_gpu(service.resources.gpu).gpu
    own = placement.gpu
    path = ("services", name, "resources", "gpu")
    if own is None and wanted in placement.facts.gpu_types():
        return wanted
    if own == wanted:
        return wanted
    everywhere = service.kind == "encode" and service.learner is None
    if own is not None and everywhere and any(one.gpu == wanted for one in placements):
        result.warnings.append(
            f"service {name} asks for {wanted}; at learner {placement.learner.name} it gets that learner's own type, "
            f"{own}"
        )
        return own
    has = own or ", ".join(placement.facts.gpu_types()) or "no GPUs"
    message = f"service {name} asks for {wanted}, learner {placement.learner.name} in {placement.facts.name} has {has}"
    hint = f"write gpu: {own}:{parse_gpu(service.resources.gpu).count}" if own else "remove gpu"
    problems.append(Refusal(path, message, hint=hint))
    return None


def _check_gpus(experiment: Experiment, placement: Placement, result: ServicePlacement) -> None:
    """Replicas with GPUs need machines besides those of the groups; first fit, largest first."""
    services = [one for one in result.by_learner[placement.learner.name] if one.gpus and one.gpu]
    if not services:
        return
    facts = placement.facts
    free = {
        one.gpu: sum(placement.usage.free(facts, i) for i, pool in enumerate(facts.pools) if pool.row.gpu == one.gpu)
        for one in services
    }
    for gpu, nodes in free.items():
        row = machine_of_gpu(gpu) if gpu else None
        assert row is not None
        bins: list[int] = []
        for count in sorted(
            (one.gpus for one in services if one.gpu == gpu for _ in range(one.replicas)), reverse=True
        ):
            slot = next((index for index, left in enumerate(bins) if left >= count), None)
            if slot is None:
                bins.append(row.gpus - count)
            else:
                bins[slot] -= count
        if len(bins) > nodes:
            first = next(one.name for one in services if one.gpu == gpu)
            message = (
                f"service replicas of learner {placement.learner.name} need {len(bins)} more {row.name} nodes, "
                f"{facts.name} has {nodes} left"
            )
            path = (
                ("services", first, "resources", "gpu")
                if experiment.services[first].resources.gpu
                else ("services", first)
            )
            result.refusals.append(Refusal(path, message, hint="fewer replicas, or fewer nodes in the groups"))
