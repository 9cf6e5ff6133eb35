"""Whether a job's pods could ever be admitted by a queue, even if nothing else ran; pure.

A coarse upper bound on purpose: it refuses only what certainly never fits (no flavor for the GPU type, more than all
quota together). Whether it fits now, and when, is Kueue's to say and `gkr why`'s to explain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gkr.cluster.explain_objects import quantity
from gkr.cluster.fields import Object, items, name_of, part, text
from spec.units import format_bytes

_NOT_COUNTED = frozenset({"ephemeral-storage", "pods"})


@dataclass(frozen=True)
class PodSet:
    """Equal pods of a job."""

    name: str
    count: int
    requests: Mapping[str, float]
    labels: Mapping[str, frozenset[str]]
    """Node labels that its required affinity and selector name, with the values they allow."""


@dataclass(frozen=True)
class Flavor:
    """What a ClusterQueue offers of one ResourceFlavor at most."""

    name: str
    most: Mapping[str, float]
    labels: Mapping[str, str]


def pod_sets(job: Object) -> list[PodSet]:
    """Of a rendered RayJob."""
    spec = job["spec"]["rayClusterSpec"]
    head = _pod_set("head", spec["headGroupSpec"]["template"], count=1)
    workers = [
        _pod_set(group["groupName"], group["template"], count=int(group.get("replicas", 1)))
        for group in items(spec, "workerGroupSpecs")
    ]
    return [head, *workers]


def flavors(queue: Object, *, known: Iterable[Object], cohort: Sequence[Object] = ()) -> list[Flavor]:
    """What the queue can hold at most: its own quota, and what it may borrow from the queues of its cohort."""
    labels = {name_of(one): part(one, "spec", "nodeLabels") for one in known}
    most: dict[str, dict[str, float]] = defaultdict(dict)
    lent = _nominal(one for one in cohort if name_of(one) != name_of(queue))
    for flavor, resource, entry in _entries(queue):
        own = quantity(entry.get("nominalQuota"))
        limit = entry.get("borrowingLimit")
        borrowable = lent.get((flavor, resource), 0.0)
        most[flavor][resource] = own + (min(borrowable, quantity(limit)) if limit is not None else borrowable)
    return [Flavor(name, amounts, labels.get(name, {})) for name, amounts in most.items()]


def never_fits(sets: Sequence[PodSet], *, offered: Sequence[Flavor], queue: str) -> list[str]:
    """Every reason why the pods can never be admitted together, with numbers; none if they might."""
    problems: list[str] = []
    usable: dict[str, set[str]] = defaultdict(set)
    totals: dict[str, float] = defaultdict(float)
    for one in sets:
        fitting = [flavor for flavor in offered if _matches(one, flavor)]
        for resource, each in one.requests.items():
            needed, most = each * one.count, max((flavor.most.get(resource, 0.0) for flavor in fitting), default=0.0)
            totals[resource] += needed
            usable[resource] |= {flavor.name for flavor in fitting if resource in flavor.most}
            if needed > most:
                problems.append(
                    _too_much(one, resource, needed=needed, most=most, queue=queue, any_flavor=bool(fitting))
                )
    if problems:
        return problems
    by_name = {flavor.name: flavor for flavor in offered}
    for resource, needed in totals.items():
        most = sum(by_name[name].most[resource] for name in usable[resource])
        if needed > most:
            numbers = f"{amount(resource, needed)} {resource} in all, and queue {queue} never has more than"
            problems.append(f"its pods ask for {numbers} {amount(resource, most)}")
    return problems


def amount(resource: str, value: float) -> str:
    """As a person writes it."""
    return format_bytes(int(value)) if resource in {"memory", "ephemeral-storage"} else f"{value:g}"


def _too_much(one: PodSet, resource: str, *, needed: float, most: float, queue: str, any_flavor: bool) -> str:
    wanted = ", ".join(f"{key}={'|'.join(sorted(values))}" for key, values in one.labels.items())
    if not any_flavor:
        return f"group {one.name} needs nodes with {wanted}, and queue {queue} has no flavor with such nodes"
    numbers = f"{amount(resource, needed)} {resource} ({one.count} x {amount(resource, needed / one.count)})"
    where = f" on nodes with {wanted}" if wanted else ""
    return f"group {one.name} asks for {numbers}{where}, and queue {queue} never has more than {amount(resource, most)}"


def _matches(one: PodSet, flavor: Flavor) -> bool:
    """A label that the flavor does not have is no obstacle: Kueue, too, looks at the flavor's own labels only."""
    return all(flavor.labels[key] in values for key, values in one.labels.items() if key in flavor.labels)


def _pod_set(name: str, template: Object, *, count: int) -> PodSet:
    """Requests default to limits, as Kubernetes has it."""
    requests: dict[str, float] = defaultdict(float)
    for container in items(template, "spec", "containers"):
        asked = {**part(container, "resources", "limits"), **part(container, "resources", "requests")}
        for resource, each in asked.items():
            if resource not in _NOT_COUNTED:
                requests[resource] += quantity(each)
    return PodSet(name, count, dict(requests), _labels(template))


def _labels(template: Object) -> dict[str, frozenset[str]]:
    found = {key: frozenset({str(value)}) for key, value in part(template, "spec", "nodeSelector").items()}
    required = part(template, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms = items(required, "nodeSelectorTerms")
    for expression in items(terms[0], "matchExpressions") if len(terms) == 1 else ():
        if expression.get("operator") == "In":
            found[expression["key"]] = frozenset(expression["values"])
    return found


def _entries(queue: Object) -> Iterable[tuple[str, str, Object]]:
    for group in items(queue, "spec", "resourceGroups"):
        for flavor in items(group, "flavors"):
            for entry in items(flavor, "resources"):
                yield text(flavor, "name"), text(entry, "name"), entry


def _nominal(queues: Iterable[Object]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    for queue in queues:
        for flavor, resource, entry in _entries(queue):
            lent, nominal = entry.get("lendingLimit"), quantity(entry.get("nominalQuota"))
            found[flavor, resource] += min(nominal, quantity(lent)) if lent is not None else nominal
    return found
