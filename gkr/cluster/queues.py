"""Kueue's queues as a researcher sees them: quota, who uses it, who waits and in which place; pure.

A ClusterQueue has the quota; LocalQueues are its names in namespaces. Workloads carry our labels in their pod
templates, so that an experiment's name is known without asking for its RayJob.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gkr.cluster.explain_objects import (
    GPU,
    Object,
    condition,
    holder_of,
    holds,
    meta,
    name,
    pod_gpus,
    quantity,
    seconds,
    spec,
    status,
    sub,
    subs,
)

PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


@dataclass(frozen=True)
class Quota:
    """What a queue may use of one resource in one flavor."""

    flavor: str
    resource: str
    nominal: float
    used: float

    @property
    def free(self) -> float:
        return max(0.0, self.nominal - self.used)


@dataclass(frozen=True)
class Claim:
    """One Workload: what it holds or asks for."""

    who: str
    """`experiment (run)`, else namespace and name."""
    namespace: str
    name: str
    queue: str
    priority: int
    priority_class: str
    gpus: float
    created: float
    admitted: float | None = None
    """Seconds since 1970; none while it waits."""
    by_flavor: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """(flavor, resource) -> amount it holds."""
    position: int | None = None
    """In its ClusterQueue, 1 is next; none when admitted or not known."""
    reason: str = ""
    """Kueue's own words while it waits."""


@dataclass(frozen=True)
class Queue:
    """One ClusterQueue."""

    name: str
    active: bool
    message: str
    """Why it is not active."""
    local: Mapping[str, str]
    """namespace/name of its LocalQueues -> message; empty when they are active."""
    quotas: Sequence[Quota]
    holding: Sequence[Claim]
    """Most GPUs first."""
    waiting: Sequence[Claim]
    """Next one first."""


def template_labels(workload: Object) -> Mapping[str, str]:
    """Labels of its pods."""
    for pod_set in subs(spec(workload), "podSets"):
        found = sub(pod_set, "template", "metadata", "labels")
        if found:
            return found
    return {}


def admission(workload: Object) -> Object | None:
    """What it was given; none while it waits."""
    return status(workload).get("admission") or None


def finished(workload: Object) -> bool:
    """It holds nothing and asks for nothing."""
    return holds(workload, "Finished")


def asked(workload: Object, resource: str = GPU) -> float:
    """What all its pods ask for together."""
    total = 0.0
    for pod_set in subs(spec(workload), "podSets"):
        pod_spec = sub(pod_set, "template", "spec")
        count = int(pod_set.get("count", 1))
        if resource == GPU:
            total += count * pod_gpus(pod_spec)
        else:
            total += count * sum(_request(one, resource) for one in subs(pod_spec, "containers"))
    return total


def _request(container: Object, resource: str) -> float:
    resources = sub(container, "resources")
    found = sub(resources, "requests").get(resource, sub(resources, "limits").get(resource))
    return quantity(found)


def claim(workload: Object, *, position: int | None = None) -> Claim:
    """A Workload as a claim on quota."""
    given = admission(workload)
    by_flavor: dict[tuple[str, str], float] = defaultdict(float)
    for one in subs(given, "podSetAssignments"):
        for resource, amount in sub(one, "resourceUsage").items():
            by_flavor[str(sub(one, "flavors").get(resource, "")), resource] += quantity(amount)
    waits = condition(workload, "QuotaReserved") if given is None else None
    reserved = condition(workload, "QuotaReserved")
    namespace = str(meta(workload).get("namespace", ""))
    held = sum(amount for (_, resource), amount in by_flavor.items() if resource == GPU)
    return Claim(
        who=holder_of(template_labels(workload), otherwise=f"{namespace}/{name(workload)}"),
        namespace=namespace,
        name=name(workload),
        queue=str(spec(workload).get("queueName", "")),
        priority=int(spec(workload).get("priority") or 0),
        priority_class=str(sub(spec(workload), "priorityClassRef").get("name", "")),
        gpus=held if given else asked(workload),
        created=seconds(meta(workload).get("creationTimestamp")) or 0.0,
        admitted=seconds(sub(reserved).get("lastTransitionTime")) if given else None,
        by_flavor=dict(by_flavor),
        position=position,
        reason=str(sub(waits).get("message", "")),
    )


def quotas(cluster_queue: Object) -> list[Quota]:
    """Quota and use of every flavor and resource."""
    used = {
        (str(flavor.get("name")), str(one.get("name"))): quantity(one.get("total"))
        for flavor in subs(status(cluster_queue), "flavorsReservation")
        for one in subs(flavor, "resources")
    }
    return [
        Quota(flavor=str(flavor.get("name")), resource=str(one.get("name")), nominal=quantity(one.get("nominalQuota")),
              used=used.get((str(flavor.get("name")), str(one.get("name"))), 0.0))
        for group in subs(spec(cluster_queue), "resourceGroups")
        for flavor in subs(group, "flavors")
        for one in subs(flavor, "resources")
    ]  # fmt: skip


def order(waiting: Iterable[Object], *, pending: Sequence[Object]) -> list[tuple[Object, int | None]]:
    """Workloads that wait with their positions: Kueue's own order where it is known, then priority and age."""
    own = {(str(meta(one).get("namespace")), name(one)): at for at, one in enumerate(pending, start=1)}

    def key(workload: Object) -> tuple[float, float, float]:
        position = own.get((str(meta(workload).get("namespace")), name(workload)))
        created = seconds(meta(workload).get("creationTimestamp")) or 0.0
        return (position or float("inf"), -float(spec(workload).get("priority") or 0), created)

    ordered = sorted(waiting, key=key)
    return [(one, own.get((str(meta(one).get("namespace")), name(one)))) for one in ordered]


def read_queues(
    cluster_queues: Iterable[Object],
    *,
    local_queues: Iterable[Object],
    workloads: Iterable[Object],
    pending: Mapping[str, Sequence[Object]],
) -> list[Queue]:
    """Every ClusterQueue with what hangs on it. `pending`: name of a ClusterQueue -> Kueue's order of who waits."""
    homes: dict[tuple[str, str], str] = {}
    local: dict[str, dict[str, str]] = defaultdict(dict)
    for one in local_queues:
        home, namespace = str(spec(one).get("clusterQueue", "")), str(meta(one).get("namespace", ""))
        homes[namespace, name(one)] = home
        local[home][f"{namespace}/{name(one)}"] = inactive(one)
    by_queue: dict[str, list[Object]] = defaultdict(list)
    for one in workloads:
        if not finished(one):
            by_queue[home_of(one, homes=homes)].append(one)
    return [
        _queue(one, local=local[name(one)], workloads=by_queue[name(one)], pending=pending.get(name(one), ()))
        for one in cluster_queues
    ]


def home_of(workload: Object, *, homes: Mapping[tuple[str, str], str]) -> str:
    """Its ClusterQueue: what admitted it, else that of its LocalQueue. `homes`: (namespace, LocalQueue) -> its own."""
    given = admission(workload)
    if given is not None:
        return str(given.get("clusterQueue", ""))
    return homes.get((str(meta(workload).get("namespace", "")), str(spec(workload).get("queueName", ""))), "")


def _queue(one: Object, *, local: Mapping[str, str], workloads: Sequence[Object], pending: Sequence[Object]) -> Queue:
    holding = [claim(each) for each in workloads if admission(each) is not None]
    waiting = order((each for each in workloads if admission(each) is None), pending=pending)
    message = inactive(one)
    return Queue(
        name=name(one),
        active=not message,
        message=message,
        local=local,
        quotas=quotas(one),
        holding=sorted(holding, key=lambda each: (-each.gpus, each.created)),
        waiting=[claim(each, position=position) for each, position in waiting],
    )


def inactive(queue: Object) -> str:
    """Why a queue takes nobody; empty if it does."""
    found = condition(queue, "Active")
    if found is not None and found.get("status") == "True":
        return ""
    return str(sub(found).get("message") or "Kueue has not looked at it yet")
