"""What runs in every cluster that was added: asked of all at once, each with a deadline, failures told apart.

No pydantic and no YAML beyond the registry's: this is most of what `gkr ps` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gkr.cluster.calls import each
from gkr.cluster.connection import Connection, connect
from gkr.cluster.fields import label, name_of, text
from gkr.cluster.observe import EXPERIMENT, LEARNER, find_runs, workloads_of
from gkr.cluster.registry import ClusterEntry, Registry, config_folder
from gkr.cluster.state import JobState, job_state
from spec.errors import GkrError

_MOST_CLUSTERS = 32


@dataclass(frozen=True)
class Found:
    """The jobs of one run in one cluster."""

    run: str
    experiment: str
    entry: ClusterEntry
    jobs: tuple[Mapping[str, Any], ...]
    states: Mapping[str, JobState]
    """By learner."""
    created: str
    """The server's time of the first job."""


def survey(registry: Registry, *, only: Iterable[str] | None = None) -> tuple[list[Found], dict[str, GkrError]]:
    """Every run in every cluster, and the clusters that did not answer."""
    entries = [registry.entries[name] for name in (registry.entries if only is None else only)]
    found: list[Found] = []
    failed: dict[str, GkrError] = {}
    for entry, answer in zip(entries, each(entries, _try, most=_MOST_CLUSTERS), strict=True):
        if isinstance(answer, GkrError):
            failed[entry.name] = answer
        else:
            found += answer
    return found, failed


def known_namespaces(entry: ClusterEntry) -> list[str]:
    """Where runs of this cluster go, by what is known here."""
    if entry.namespace:
        return [entry.namespace]
    try:
        facts: dict[str, Any] = json.loads((config_folder() / "facts" / f"{entry.name}.json").read_bytes())
    except (OSError, ValueError):
        facts = {}
    namespaces: list[str] = facts.get("namespaces") or ["default"]
    return namespaces


def _try(entry: ClusterEntry) -> list[Found] | GkrError:
    try:
        connection = connect(entry)
        try:
            return _ask(entry, connection)
        finally:
            connection.close()
    except GkrError as error:
        return error


def _ask(entry: ClusterEntry, connection: Connection) -> list[Found]:
    runs = find_runs(connection, namespaces=known_namespaces(entry))
    queued = {
        job["metadata"]["namespace"] for jobs in runs.values() for job in jobs if job_state(job).phase == "queued"
    }
    workloads = {uid: one for namespace in queued for uid, one in workloads_of(connection, namespace=namespace).items()}
    return [_found(entry, run, jobs, workloads) for run, jobs in runs.items()]


def _found(
    entry: ClusterEntry, run: str, jobs: Sequence[Mapping[str, Any]], workloads: Mapping[str, Mapping[str, Any]]
) -> Found:
    states = {
        label(job, LEARNER) or name_of(job): job_state(job, workload=workloads.get(job["metadata"]["uid"]))
        for job in jobs
    }
    created = min(text(job, "metadata", "creationTimestamp") for job in jobs)
    return Found(run, label(jobs[0], EXPERIMENT), entry, tuple(jobs), states, created)
