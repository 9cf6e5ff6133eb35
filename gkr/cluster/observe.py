"""Asking clusters where runs stand: few requests, no pydantic, so that `gkr ps` stays quick."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gkr.cluster.calls import each
from gkr.cluster.connection import Connection
from gkr.cluster.fields import items, label, text
from gkr.cluster.kinds import ALL
from gkr.cluster.places import LearnerPlace, Places
from gkr.cluster.state import JobState, job_state
from spec.errors import RefusedError

EXPERIMENT, RUN, LEARNER = "gkr/experiment", "gkr/run", "gkr/learner"
"""Labels of the objects of a run, as `manifests.labels` sets them: not imported, because that costs pydantic."""
MANAGED = {"app.kubernetes.io/managed-by": "gkr"}

Connections = Mapping[str, Connection]


def observe(places: Places, connections: Connections) -> dict[str, JobState]:
    """The state of each learner's job."""
    groups: dict[tuple[str, str], list[LearnerPlace]] = defaultdict(list)
    for one in places.learners:
        groups[one.cluster, one.namespace].append(one)
    answers = each(groups.items(), lambda one: _observe(one[1], connections[one[0][0]], places.run))
    return {name: state for answer in answers for name, state in answer.items()}


def find_runs(connection: Connection, *, namespaces: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The RayJobs of every run in a cluster, by run.

    Asks for all namespaces at once, and for the known ones where that right is missing.
    """
    try:
        jobs = connection.list("RayJob", namespace=ALL, labels=MANAGED)
    except RefusedError:
        jobs = [job for one in dict.fromkeys(namespaces) for job in _list(connection, one)]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for job in jobs:
        run = label(job, RUN)
        if run:
            found[run].append(job)
    return dict(found)


def workloads_of(connection: Connection, *, namespace: str) -> dict[str, dict[str, Any]]:
    """Kueue's Workloads by the uid of the object that owns them."""
    found: dict[str, dict[str, Any]] = {}
    for workload in connection.list("Workload", namespace=namespace):
        for owner in items(workload, "metadata", "ownerReferences"):
            found[text(owner, "uid")] = workload
    return found


def _observe(learners: list[LearnerPlace], connection: Connection, run: str) -> dict[str, JobState]:
    namespace = learners[0].namespace
    jobs = {job["metadata"]["name"]: job for job in connection.list("RayJob", namespace=namespace, labels={RUN: run})}
    states = {one.learner: job_state(jobs.get(one.job)) for one in learners}
    if any(state.phase == "queued" for state in states.values()):
        workloads = workloads_of(connection, namespace=namespace)
        for one in learners:
            job = jobs.get(one.job)
            if job is not None:
                states[one.learner] = job_state(job, workload=workloads.get(job["metadata"]["uid"]))
    return states


def _list(connection: Connection, namespace: str) -> list[dict[str, Any]]:
    return connection.list("RayJob", namespace=namespace, labels=MANAGED)
