"""Ending a run in its clusters: everything with its label goes, and we wait until no pod and no Workload is left.

Works in every state, because it asks for nothing but labels: queued, starting, running, ended, half created, half
removed. Promises: names of other runs are never touched; what is left after the deadline is named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gkr.cluster.calls import each
from gkr.cluster.connection import Connection
from gkr.cluster.fields import items, name_of, text
from gkr.cluster.observe import RUN
from gkr.cluster.places import Places
from spec.errors import NotFoundError

FIRST = ("RayJob", "Job")
"""Own the pods."""
REST = ("Service", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap", "Secret", "ServiceAccount")
_POLL_SECONDS = 0.5
_QUICK_POLL_SECONDS = 0.1


def remove(
    places: Places,
    *,
    connections: Mapping[str, Connection],
    now: bool,
    timeout_seconds: float,
) -> list[str]:
    """Remove a run; what is left of it after the deadline."""
    deadline = time.monotonic() + timeout_seconds
    where = [(connections[cluster], namespace) for cluster, namespace in places.namespaces()]
    jobs = [job for found in each(where, lambda one: _owners(*one, places.run)) for job in found]
    each(jobs, lambda job: job[0].delete(job[1], job[3], namespace=job[2]))
    owners = {(job[0].name, job[2], job[3]) for job in jobs}
    owners |= {(one.cluster, one.namespace, one.job) for one in places.all()}
    while True:
        left = each(where, lambda one: _left(*one, places.run, owners, now=now))
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(_QUICK_POLL_SECONDS if now else _POLL_SECONDS)
    each(where, lambda one: _remove_rest(*one, places.run))
    return [one for found in left for one in found]


def _owners(connection: Connection, namespace: str, run: str) -> list[tuple[Connection, str, str, str]]:
    return [
        (connection, kind, namespace, name_of(obj)) for kind in FIRST for obj in _list(connection, kind, namespace, run)
    ]


def _left(
    connection: Connection, namespace: str, run: str, owners: set[tuple[str, str, str]], *, now: bool
) -> list[str]:
    """Owners, RayClusters, pods and Workloads of the run that are still there."""
    left: list[str] = []
    for kind in (*FIRST, "RayCluster", "Pod"):
        for obj in _list(connection, kind, namespace, run):
            name = name_of(obj)
            left.append(f"{kind} {name}")
            if kind in FIRST and not obj["metadata"].get("deletionTimestamp"):
                connection.delete(kind, name, namespace=namespace)  # created while we were looking
            elif kind == "Pod" and now:
                connection.delete("Pod", name, namespace=namespace, grace_seconds=0)
    for workload in _list(connection, "Workload", namespace, None):
        owned = items(workload, "metadata", "ownerReferences")
        if any((connection.name, namespace, text(owner, "name")) in owners for owner in owned):
            left.append(f"Workload {name_of(workload)}")
    return left


def _remove_rest(connection: Connection, namespace: str, run: str) -> None:
    for kind in REST:
        for obj in _list(connection, kind, namespace, run):
            connection.delete(kind, name_of(obj), namespace=namespace)


def _list(connection: Connection, kind: str, namespace: str, run: str | None) -> list[dict[str, Any]]:
    try:
        return connection.list(kind, namespace=namespace, labels={RUN: run} if run else None)
    except NotFoundError:
        return []  # the kind, or the namespace, is gone: so is everything of it
