"""Before anything is created: could this run ever start in its clusters, and may the caller do all that gkr will do.

Promises: every problem of every cluster is found in one go, each with its remedy; nothing is created (the last check is
the server's own dry-run of every object). Must not judge whether the run fits now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gkr.cluster.calls import each
from gkr.cluster.connection import Connection, label_of
from gkr.cluster.fields import items, label, part, text
from gkr.cluster.kinds import ALL, KINDS
from gkr.cluster.observe import EXPERIMENT, MANAGED, RUN
from gkr.cluster.quota import flavors, never_fits, pod_sets
from manifests.labels import OUTER
from manifests.names import shared_secret
from spec.errors import EXIT_UNREACHABLE, GkrError, NotFoundError, RefusedError
from spec.plan import LearnerPlan, Plan

Objects = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Problem:
    """One reason why the cluster would refuse, and what mends it."""

    cluster: str
    message: str
    hint: str


class Right(NamedTuple):
    """Something the caller must be allowed to do in a namespace."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    why: str = ""


RIGHTS = (
    Right("patch", "ray.io", "rayjobs", why="launch"),
    Right("create", "ray.io", "rayjobs", why="launch"),
    Right("get", "ray.io", "rayjobs", why="see the run"),
    Right("list", "ray.io", "rayjobs", why="see the run"),
    Right("delete", "ray.io", "rayjobs", why="cancel"),
    Right("list", "", "pods", why="see the run"),
    Right("delete", "", "pods", why="cancel"),
    Right("get", "", "pods", "log", why="read logs"),
    Right("create", "", "pods", "exec", why="gkr exec"),
    Right("list", "kueue.x-k8s.io", "workloads", why="see why it waits"),
)
"""In every namespace of a run, beside creating and deleting each kind that is rendered."""


def preflight(plan: Plan, objects: Mapping[str, Objects], *, connections: Mapping[str, Connection]) -> None:
    """RefusedError with everything that is in the way; unreachable clusters are reported as such."""
    found = each(connections.values(), lambda one: _check_cluster(plan, objects.get(one.name, ()), connection=one))
    raise_problems([problem for problems in found for problem in problems])


def raise_problems(problems: Sequence[Problem]) -> None:
    """One error for all of them."""
    if not problems:
        return
    if len(problems) == 1:
        one = problems[0]
        raise RefusedError(one.message, where=f"cluster {one.cluster}", hint=one.hint)
    lines = "".join(f"\n  - cluster {one.cluster}: {one.message}\n    hint: {one.hint}" for one in problems)
    raise RefusedError(f"nothing was created, for {len(problems)} reasons:{lines}")


def _check_cluster(plan: Plan, objects: Objects, *, connection: Connection) -> list[Problem]:
    learners = [one for one in plan.learners if one.cluster == connection.name]
    namespaces = list(dict.fromkeys(str(one["metadata"]["namespace"]) for one in objects))
    missing = [problem for one in namespaces for problem in _check_namespace(connection, one)]
    if missing:
        return missing  # everything below would only repeat it
    secrets = plan.has_keys or bool(plan.env_from_caller)
    rights = _check_rights(connection, objects, namespaces=namespaces, secrets=secrets)
    checks: list[Callable[[], Iterable[Problem]]] = [lambda: _check_priority(plan, connection)]
    checks += [lambda: _check_outer(plan, connection)]
    checks += [lambda one=one: _check_queue(one, objects, connection=connection) for one in learners]
    checks += [lambda one=one: _check_named(plan, one, connection=connection) for one in learners]
    found = [problem for problems in each(checks, _where_allowed) for problem in problems]
    if rights or found:
        return [*rights, *found]
    return _dry_run(objects, connection=connection)


def _where_allowed(check: Callable[[], Iterable[Problem]]) -> list[Problem]:
    """What a person of one namespace may not look at (queues, priorities of the whole cluster) is left to the cluster
    to say: the dry-run, Kueue, and then `gkr why`.
    """
    try:
        return list(check())
    except RefusedError:
        return []


def _check_namespace(connection: Connection, name: str) -> Iterable[Problem]:
    try:
        connection.get("Namespace", name)
    except NotFoundError:
        hint = f"create it, or choose another: `gkr clusters add {connection.name} --namespace NAME --replace`"
        yield Problem(connection.name, f'there is no namespace "{name}"', hint)
    except RefusedError:
        return  # a person of one namespace may not read namespaces; the objects will show whether it is there


def _check_priority(plan: Plan, connection: Connection) -> Iterable[Problem]:
    known = [one["metadata"]["name"] for one in connection.list("WorkloadPriorityClass")]
    if plan.priority not in known:
        hint = f"priorities there: {', '.join(sorted(known)) or 'none'}; set `priority` in the file"
        yield Problem(connection.name, f'there is no priority "{plan.priority}"', hint)


def _check_outer(plan: Plan, connection: Connection) -> Iterable[Problem]:
    """A cluster has one address at which learners of other clusters find a syncer: a second one would get the first
    one's calls, and refuse them.
    """
    syncer = plan.syncer
    if syncer is None or not syncer.outer_host or syncer.cluster != connection.name:
        return
    try:
        jobs = connection.list("Job", namespace=ALL, labels=MANAGED)
    except RefusedError:
        jobs = connection.list("Job", namespace=syncer.namespace, labels=MANAGED)
    for job in jobs:
        own = part(job, "spec", "template", "metadata", "labels")
        if label(job, RUN) != plan.run and OUTER.items() <= own.items() and not _is_over(job):
            words = f"run {label(job, RUN)} has the address {syncer.outer_host}, at which other clusters reach a syncer"
            hint = f"wait for its end, `gkr cancel {label(job, EXPERIMENT)}`, or name another cluster's learner first"
            yield Problem(connection.name, words, hint)


def _is_over(job: Mapping[str, Any]) -> bool:
    ended = {text(one, "type") for one in items(job, "status", "conditions") if text(one, "status") == "True"}
    return bool(ended & {"Complete", "Failed"}) or bool(text(job, "metadata", "deletionTimestamp"))


def _check_queue(learner: LearnerPlan, objects: Objects, *, connection: Connection) -> Iterable[Problem]:
    queue, name = connection.find("LocalQueue", str(learner.queue), namespace=learner.namespace), connection.name
    if queue is None:
        known = sorted(one["metadata"]["name"] for one in connection.list("LocalQueue", namespace=learner.namespace))
        hint = f"queues there: {', '.join(known) or 'none'}; set `queue` in the file, or ask for one in this namespace"
        yield Problem(name, f'namespace {learner.namespace} has no queue "{learner.queue}"', hint)
        return
    target = text(queue, "spec", "clusterQueue")
    cluster_queue = connection.find("ClusterQueue", target)
    if cluster_queue is None:
        words = f"queue {learner.queue} leads to ClusterQueue {target}, which is not there"
        yield Problem(name, words, "ask an administrator of the cluster")
        return
    policy = text(cluster_queue, "spec", "stopPolicy") or "None"
    if policy != "None":
        yield Problem(name, f"queue {learner.queue} is stopped ({policy})", "take another, or ask who stopped it")
    yield from _check_quota(learner, objects, cluster_queue=cluster_queue, connection=connection)


def _check_quota(
    learner: LearnerPlan, objects: Objects, *, cluster_queue: Mapping[str, Any], connection: Connection
) -> Iterable[Problem]:
    job = next((one for one in objects if one["kind"] == "RayJob" and one["metadata"]["name"] == learner.job), None)
    if job is None:
        return
    cohort = text(cluster_queue, "spec", "cohortName")
    others = [one for one in connection.list("ClusterQueue") if cohort and text(one, "spec", "cohortName") == cohort]
    offered = flavors(cluster_queue, known=connection.list("ResourceFlavor"), cohort=others)
    for reason in never_fits(pod_sets(job), offered=offered, queue=str(learner.queue)):
        hint = "ask for less, or take another queue or cluster: `gkr queues` shows quotas"
        yield Problem(connection.name, f"learner {learner.name} can never start: {reason}", hint)


def _check_named(plan: Plan, learner: LearnerPlan, *, connection: Connection) -> Iterable[Problem]:
    """Secrets and the service account that pods refer to by name: without them they would never start."""
    names = [(one, "`secrets` in the file") for one in plan.secrets]
    names += [(one, "the cluster's facts") for one in [learner.site.bucket_secret, shared_secret(learner)] if one]
    names += [(one, "the cluster's facts") for one in learner.site.image_pull_secrets]
    for secret, origin in dict(names).items():
        if _missing(connection, "Secret", secret, namespace=learner.namespace):
            words = f"namespace {learner.namespace} has no secret {secret}, which {origin} names"
            hint = f"kubectl -n {learner.namespace} create secret generic {secret} --from-literal=KEY=VALUE"
            yield Problem(connection.name, words, hint if secret in plan.secrets else "deploy its platform stack again")
    account = learner.site.service_account
    if account and _missing(connection, "ServiceAccount", account, namespace=learner.namespace):
        words = f"namespace {learner.namespace} has no service account {account}, which the cluster's facts name"
        yield Problem(connection.name, words, "deploy its platform stack again, or ask for it in this namespace")


def _missing(connection: Connection, kind: str, name: str, *, namespace: str) -> bool:
    try:
        return connection.find(kind, name, namespace=namespace) is None
    except RefusedError:
        return False  # may not look; the pods will say


def _check_rights(
    connection: Connection, objects: Objects, *, namespaces: Sequence[str], secrets: bool
) -> list[Problem]:
    kinds = {str(one["kind"]) for one in objects} | ({"Secret"} if secrets else set[str]())
    wanted = {
        Right(verb, KINDS[kind].group, KINDS[kind].plural, why="launch" if verb != "delete" else "cancel")
        for kind in kinds
        for verb in ("create", "patch", "delete")
    }
    asked = [(namespace, right) for namespace in namespaces for right in dict.fromkeys([*RIGHTS, *sorted(wanted)])]
    answers = each(asked, lambda one: _allowed(connection, one[1], namespace=one[0]))
    denied = [one for one, allowed in zip(asked, answers, strict=True) if not allowed]
    return [_denied(connection, namespace, denied) for namespace in dict.fromkeys(one for one, _ in denied)]


def _denied(connection: Connection, namespace: str, denied: Sequence[tuple[str, Right]]) -> Problem:
    rights = [right for where, right in denied if where == namespace]
    texts = sorted({f"{one.verb} {one.resource}{f'/{one.subresource}' if one.subresource else ''}" for one in rights})
    words = f"you may not, in namespace {namespace}: {', '.join(texts)}"
    purposes = ", ".join(sorted({one.why for one in rights if one.why}))
    return Problem(connection.name, words, f"needed to {purposes}; ask for the role that gkr's users have there")


def _allowed(connection: Connection, right: Right, *, namespace: str) -> bool:
    attributes = {"namespace": namespace, "verb": right.verb, "group": right.group, "resource": right.resource}
    review = {
        "apiVersion": KINDS["SelfSubjectAccessReview"].api_version,
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**attributes, "subresource": right.subresource}},
    }
    return part(connection.create(review), "status").get("allowed") is True


def _dry_run(objects: Objects, *, connection: Connection) -> list[Problem]:
    found = each(objects, lambda one: _refusal(one, connection=connection))
    return [problem for problem in found if problem is not None]


def _refusal(obj: Mapping[str, Any], *, connection: Connection) -> Problem | None:
    try:
        connection.apply(obj, dry_run=True)
    except GkrError as error:
        if error.exit_code == EXIT_UNREACHABLE:
            raise
        return Problem(connection.name, error.message, error.hint or f"look at `gkr render` for {label_of(obj)}")
    return None
