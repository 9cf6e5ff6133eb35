"""From a plan to a run in its clusters.

Promises: nothing is created before every cluster said that it would take all of it; if one creation fails or is
interrupted, what was created is removed again, in every cluster; the run's folder exists before the first object does,
so that a run can always be cancelled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkr.cluster.buckets import bucket_uri, cluster_bucket, run_bucket
from gkr.cluster.cancel import remove
from gkr.cluster.code import Archive, pack, upload
from gkr.cluster.connection import Connection, connect
from gkr.cluster.mirror import append, locked, status_event
from gkr.cluster.places import LearnerPlace, Places, write_places
from gkr.cluster.preflight import preflight
from gkr.cluster.registry import ClusterEntry
from gkr.local.launcher import create_run
from gkr.runs import Run
from gkr.sync_keys import SYNCER, keys_of_plan
from manifests import labels, names
from manifests.render import render
from spec.errors import EXIT_CANCELLED, GkrError
from spec.plan import LearnerPlan, Plan
from spec.units import format_bytes

Objects = Mapping[str, Sequence[Mapping[str, Any]]]
Say = Callable[[str], None]
_UNDO_SECONDS = 60.0


@dataclass(frozen=True)
class Prepared:
    """A plan with everything that launching it needs, nothing written yet."""

    plan: Plan
    objects: Objects
    places: Places
    archive: Archive | None


def prepare(plan: Plan, *, entries: Mapping[str, ClusterEntry], say: Say) -> Prepared:
    """Pack the code and render; makes no request."""
    archive = None
    if plan.code is not None:
        archive = pack(Path(plan.code))
        say(f"code: {archive.files} files, {format_bytes(len(archive.data))} packed, {archive.sha256[:12]}")
        plan = plan.model_copy(update={"code_sha256": archive.sha256})
    return Prepared(plan, render(plan), places_of(plan, entries=entries), archive)


def launch(prepared: Prepared, *, root: Path, say: Say) -> Run:
    """Check, write the run's folder, upload, create; the run."""
    with connected(prepared.places) as connections:
        preflight(prepared.plan, prepared.objects, connections=connections)
        run = create_run(prepared.plan, root=root)
        write_places(run.path, prepared.places)
        try:
            _upload(prepared, connections=connections, say=say)
            _create(prepared, connections=connections)
        except KeyboardInterrupt:
            _undo(run, prepared.places, connections, status="cancelled", reason="interrupted while it was created")
            raise
        except GkrError as error:
            _undo(run, prepared.places, connections, status="failed", reason=f"could not be created: {error.message}")
            raise
    with locked(run.path):
        append(run.path, [status_event("preparing", "", exit_code=None)])
    return run


@contextmanager
def connected(places: Places) -> Generator[dict[str, Connection]]:
    """A connection to every cluster of a run."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(closing(connect(entry))) for name, entry in places.clusters.items()}


def places_of(plan: Plan, *, entries: Mapping[str, ClusterEntry]) -> Places:
    """Where a plan's objects go."""
    learners = tuple(LearnerPlace(one.name, one.cluster, one.namespace, one.job) for one in plan.learners)
    syncer = None
    if plan.syncer is not None:
        syncer = LearnerPlace("", plan.syncer.cluster, plan.syncer.namespace, plan.syncer.name)
    used = {one.cluster for one in learners}
    return Places(plan.experiment, plan.run, learners, {name: entries[name] for name in sorted(used)}, syncer)


def _upload(prepared: Prepared, *, connections: Mapping[str, Connection], say: Say) -> None:
    """Code to every bucket, the plan to the home one."""
    plan = prepared.plan
    run_bucket(connections[plan.home.cluster], learner=plan.home).put(
        "plan.json", plan.model_dump_json(indent=1).encode()
    )
    if prepared.archive is None:
        return
    first_in: dict[str, LearnerPlan] = {}
    for learner in plan.learners:
        first_in.setdefault(bucket_uri(learner.run_uri), learner)
    for uri, learner in first_in.items():
        bucket = cluster_bucket(connections[learner.cluster], learner=learner)
        if upload(prepared.archive, bucket=bucket):
            say(f"code uploaded to {uri}")


def _create(prepared: Prepared, *, connections: Mapping[str, Connection]) -> None:
    """Home first: its syncer is there when other regions' learners ask for it."""
    plan = prepared.plan
    for learner in plan.learners:
        secret = env_secret(plan, learner)
        if secret is not None:
            connections[learner.cluster].apply(secret)
    keys = key_secrets(plan)
    for cluster, secret in keys:
        connections[cluster].apply(secret)
    home = plan.home.cluster
    owners: dict[tuple[str, str, str], dict[str, Any]] = {}
    for cluster in sorted(prepared.objects, key=lambda name: (name != home, name)):
        for obj in prepared.objects[cluster]:
            made = connections[cluster].apply(obj)
            if obj["kind"] in {"RayJob", "Job"}:
                owners[cluster, obj["metadata"]["namespace"], names.keys_secret(obj["metadata"]["name"])] = made
    for cluster, secret in keys:
        own = secret["metadata"]
        _give(secret, connections[cluster], owner=owners[cluster, own["namespace"], own["name"]])


def _give(secret: Mapping[str, Any], connection: Connection, *, owner: Mapping[str, Any]) -> None:
    """The Secret goes when its owner goes, whoever removes that."""
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    reference |= {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    own = secret["metadata"]
    change = {"metadata": {"ownerReferences": [reference]}}
    connection.patch("Secret", own["name"], change, namespace=own["namespace"])


def key_secrets(plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    """Cluster and Secret for the syncer and for each learner: keys made here for this launch, and kept nowhere else."""
    keys = keys_of_plan(plan)
    if not keys:
        return []
    where = [
        (one.cluster, one.namespace, one.job, keys[one.name], labels.labels(plan, learner=one)) for one in plan.learners
    ]
    if plan.syncer is not None:
        own = plan.syncer
        where.insert(0, (own.cluster, own.namespace, own.name, keys[SYNCER], labels.labels(plan)))
    return [
        (
            cluster,
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": names.keys_secret(owner), "namespace": namespace, "labels": own},
                "immutable": True,
                "stringData": {name: content.decode() for name, content in files.items()},
            },
        )
        for cluster, namespace, owner, files, own in where
    ]


def env_secret(plan: Plan, learner: LearnerPlan) -> dict[str, Any] | None:
    """The only place where values of the caller's variables go; never rendered, never written here."""
    if not plan.env_from_caller:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.env_secret(learner),
            "namespace": learner.namespace,
            "labels": labels.labels(plan, learner=learner),
        },
        "stringData": {name: os.environ[name] for name in plan.env_from_caller},
    }


def _undo(run: Run, places: Places, connections: Mapping[str, Connection], *, status: str, reason: str) -> None:
    """Must not hide why it is done: what goes wrong here is said beside it."""
    try:
        left = remove(places, connections=connections, now=True, timeout_seconds=_UNDO_SECONDS)
    except GkrError as error:
        left = [f"perhaps all of it ({error.message})"]
    if left:
        reason = f"{reason}; still there: {', '.join(left)}"
    code = EXIT_CANCELLED if status == "cancelled" else GkrError.exit_code
    with locked(run.path):
        append(run.path, [status_event(status, reason, exit_code=code)])
