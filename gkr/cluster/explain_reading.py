"""Reads from a cluster what the views show; the only module of them that asks.

Promises: few requests, side by side, each with a deadline; a right that is missing for the whole cluster falls back to
the namespaces that are known, and what cannot be read at all is left out rather than guessed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

from gkr.cluster.capacity import Node, read_nodes
from gkr.cluster.connection import Connection
from gkr.cluster.explain_facts import Facts
from gkr.cluster.explain_objects import (
    Object,
    holds,
    leaving,
    meta,
    name,
    node_of,
    owner,
    phase,
    spec,
    status,
    sub,
    subs,
)
from gkr.cluster.kinds import ALL
from gkr.cluster.places import LearnerPlace
from gkr.cluster.queues import Queue, home_of, read_queues
from manifests.labels import LEARNER, ROLE, RUN
from manifests.names import HEAD, SYNCER, private_services, service_group
from spec.errors import NotFoundError, RefusedError, UnreachableError
from spec.plan import Plan

T = TypeVar("T")

_VISIBILITY = ("visibility.kueue.x-k8s.io", "v1beta2")


def read_cluster_nodes(connection: Connection) -> list[Node]:
    """All nodes with what is on them: two paged lists, side by side."""
    nodes, pods = side_by_side(partial(connection.list, "Node"), partial(placed_pods, connection))
    return read_nodes(nodes, pods=pods)


def placed_pods(connection: Connection) -> list[dict[str, Any]]:
    """Every pod that has a node."""
    from lightkube.operators import not_equal

    bound: Any = {"spec.nodeName": not_equal("")}
    return connection.list("Pod", namespace=ALL, fields=bound)


def read_cluster_queues(connection: Connection, *, namespaces: Sequence[str]) -> list[Queue]:
    """All queues; of the known namespaces only where the right to list all is missing."""
    cluster_queues, local_queues, workloads = side_by_side(
        partial(connection.list, "ClusterQueue"),
        partial(everywhere, connection, "LocalQueue", namespaces=namespaces),
        partial(everywhere, connection, "Workload", namespaces=namespaces),
    )
    waiting = [one for one in cluster_queues if status(one).get("pendingWorkloads")]
    orders = side_by_side(*(partial(pending, connection, name(one)) for one in waiting))
    return read_queues(
        cluster_queues,
        local_queues=local_queues,
        workloads=workloads,
        pending={name(one): order for one, order in zip(waiting, orders, strict=True)},
    )


def everywhere(connection: Connection, kind: str, *, namespaces: Sequence[str]) -> list[dict[str, Any]]:
    """Of all namespaces, else of those."""
    try:
        return connection.list(kind, namespace=ALL)
    except RefusedError:
        known = dict.fromkeys(namespaces or (connection.namespace,))
        return [one for namespace in known for one in connection.list(kind, namespace=namespace)]


def pending(connection: Connection, queue: str) -> Sequence[Object]:
    """Kueue's own order of who waits; empty where its visibility server is off or closed to us."""
    try:
        with connection.translate(f"read who waits in queue {queue}"):
            # The client joins path and name: a sub-resource is a name with a slash.
            found: Any = connection.client.get(_pending_resource(), f"{queue}/pendingworkloads")
    except (NotFoundError, RefusedError, UnreachableError):
        return []
    return subs(found, "items")


def read_facts(connection: Connection, place: LearnerPlace, *, run: str, plan: Plan) -> Facts:
    """Everything about one learner; about the syncer if the place names no learner. Deeper things only when needed."""
    selector = {RUN: run, **({LEARNER: place.learner} if place.learner else {ROLE: SYNCER})}
    base = Facts(
        learner=place.learner or SYNCER,
        cluster=place.cluster,
        namespace=place.namespace,
        job=place.job if place.learner else "",
        queue=_queue_of(plan, place.learner),
        now=time.time(),
        expected=expected_pods(plan, place.learner),
    )
    pods, rayjob, workloads, local_queues = side_by_side(
        partial(connection.list, "Pod", namespace=place.namespace, labels=selector),
        partial(_rayjob, connection, place),
        partial(_workloads, connection, place),
        partial(_local_queues, connection, place),
    )
    facts = replace(base, pods=pods, rayjob=rayjob, local_queues=local_queues, workload=_own(workloads, rayjob, place))
    return _deeper(connection, facts, workloads=workloads)


def _deeper(connection: Connection, facts: Facts, *, workloads: Sequence[Object]) -> Facts:
    """What only some levels look at."""
    admitted = facts.workload is not None and holds(facts.workload, "Admitted")
    late = [pod for pod in facts.pods if not leaving(pod) and not holds(pod, "Ready")]
    if facts.workload is not None and not admitted:
        facts = _with_queue(connection, facts, workloads=workloads)
    if facts.job and facts.rayjob is not None and not facts.pods:
        facts = replace(facts, raycluster=_raycluster(connection, facts))
    if late or (admitted and not facts.pods) or (not facts.job and not facts.pods):
        facts = replace(facts, events=_events(connection, facts))
    homeless = any(not node_of(pod) and phase(pod) == "Pending" for pod in late)
    if homeless or (facts.workload is not None and not holds(facts.workload, "QuotaReserved")):
        facts = replace(facts, nodes=optional(partial(read_cluster_nodes, connection), otherwise=[]))
    return facts


def _with_queue(connection: Connection, facts: Facts, *, workloads: Sequence[Object]) -> Facts:
    homes = {(facts.namespace, name(one)): str(spec(one).get("clusterQueue", "")) for one in facts.local_queues}
    home = home_of(facts.workload or {}, homes=homes)
    if not home:
        return facts
    queue, others, order, classes, all_homes, flavors = side_by_side(
        partial(optional, partial(connection.find, "ClusterQueue", home), otherwise=None),
        partial(optional, partial(connection.list, "Workload", namespace=ALL), otherwise=list(workloads)),
        partial(pending, connection, home),
        partial(optional, partial(connection.list, "WorkloadPriorityClass"), otherwise=[]),
        partial(optional, partial(connection.list, "LocalQueue", namespace=ALL), otherwise=list(facts.local_queues)),
        partial(optional, partial(connection.list, "ResourceFlavor"), otherwise=[]),
    )
    homes = {(str(meta(one).get("namespace")), name(one)): str(spec(one).get("clusterQueue", "")) for one in all_homes}
    sharing = [one for one in others if home_of(one, homes=homes) == home and not holds(one, "Finished")]
    priorities = {name(one): int(one.get("value") or 0) for one in classes}
    return replace(facts, cluster_queue=queue, workloads=sharing, pending=order, priorities=priorities, flavors=flavors)


def expected_pods(plan: Plan, learner: str) -> dict[str, int]:
    """Pods by group, head and private services too."""
    if not learner:
        return {SYNCER: 1}
    own = plan.learner(learner)
    groups = Counter(node.group for node in own.nodes)
    services = {service_group(one): one.replicas for one in private_services(own)}
    return {HEAD: 1, **groups, **services}


QUESTIONS_SECONDS = 120.0
"""Longest wait for one question: a few requests, each of which ends by its own deadline."""


def side_by_side(*questions: Callable[[], Any]) -> list[Any]:
    """All answers, asked at the same time."""
    if not questions:
        return []
    with ThreadPoolExecutor(max_workers=len(questions)) as pool:
        asked = [pool.submit(question) for question in questions]
        return [one.result(timeout=QUESTIONS_SECONDS) for one in asked]


def optional(question: Callable[[], T], *, otherwise: T) -> T:
    """The answer, or the other thing where a right or a kind is missing."""
    try:
        return question()
    except (RefusedError, NotFoundError):
        return otherwise


def _rayjob(connection: Connection, place: LearnerPlace) -> dict[str, Any] | None:
    return connection.find("RayJob", place.job, namespace=place.namespace) if place.learner else None


def _workloads(connection: Connection, place: LearnerPlace) -> list[dict[str, Any]]:
    if not place.learner:
        return []
    return optional(partial(connection.list, "Workload", namespace=place.namespace), otherwise=[])


def _local_queues(connection: Connection, place: LearnerPlace) -> list[dict[str, Any]]:
    if not place.learner:
        return []
    return optional(partial(connection.list, "LocalQueue", namespace=place.namespace), otherwise=[])


def _raycluster(connection: Connection, facts: Facts) -> Object | None:
    own = str(status(facts.rayjob or {}).get("rayClusterName") or "")
    return connection.find("RayCluster", own, namespace=facts.namespace) if own else None


def _events(connection: Connection, facts: Facts) -> list[dict[str, Any]]:
    """About its pods, its RayJob, its RayCluster: everything whose name begins like them."""
    names = {name(pod) for pod in facts.pods}
    found = optional(partial(connection.list, "Event", namespace=facts.namespace), otherwise=[])
    prefix = facts.job or "\0"

    def about(one: Object) -> bool:
        own = str(sub(one, "involvedObject").get("name") or "")
        return own in names or own.startswith(prefix)

    return [one for one in found if about(one)]


def _own(workloads: Sequence[Object], rayjob: Object | None, place: LearnerPlace) -> Object | None:
    uid = meta(rayjob or {}).get("uid")
    for one in workloads:
        job = owner(one, "RayJob")
        if job is not None and (job.get("uid") == uid if uid else job.get("name") == place.job):
            return one
    return None


def _queue_of(plan: Plan, learner: str) -> str:
    return (plan.learner(learner).queue or "") if learner else ""


@cache
def _pending_resource() -> Any:
    from lightkube import generic_resource as generic

    create: Any = generic.create_global_resource  # type: ignore[reportUnknownMemberType]
    return create(*_VISIBILITY, "ClusterQueue", "clusterqueues")
