"""Levels 1 to 4: was it created, does Kueue know it, is there quota and a place for it, did every check agree; pure."""

from __future__ import annotations

from gkr.cluster.explain_facts import Facts, Level, Remedy, Verdict
from gkr.cluster.explain_holders import amount_of, holders, holders_line, what_frees
from gkr.cluster.explain_objects import Object, condition, holds, labels, listed, name, spec, status, sub, subs
from gkr.cluster.explain_place import no_place
from gkr.cluster.explain_quota import Obstacle, read_message
from gkr.cluster.explain_reckon import reckon
from gkr.cluster.queues import admission, asked, inactive, order, quotas

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_OVER = {"Complete": "it has succeeded", "Failed": "it has failed"}


def created(facts: Facts) -> Verdict | None:
    """Level 1: there is a RayJob, KubeRay accepts it, and it is not over."""
    if facts.rayjob is None:
        evidence = (f"cluster {facts.cluster} answers and has no object of that name",)
        text = f"there is no RayJob {facts.job} in namespace {facts.namespace}"
        action = "launch it again: it was never created, or somebody deleted it"
        return Verdict(Level.CREATED, text, "change", evidence, action=action)
    seen = status(facts.rayjob)
    deployment, reason = str(seen.get("jobDeploymentStatus") or ""), str(seen.get("reason") or "")
    words = (str(seen["message"]),) if seen.get("message") else ()
    if deployment == "ValidationFailed":
        text = f"KubeRay refuses RayJob {facts.job}"
        return Verdict(Level.CREATED, text, "change", words, action="change the experiment as KubeRay says")
    if deployment not in _OVER:
        return None
    text = _OVER[deployment] + (f" ({reason})" if reason else "")
    action = "" if deployment == "Complete" else "`gkr logs RUN --failed` shows the process that failed first"
    return Verdict(Level.CREATED, text, "none", words, action=action)


def queued(facts: Facts) -> Verdict | None:
    """Level 2: Kueue has a Workload for it."""
    if facts.workload is not None:
        return None
    label = labels(facts.rayjob or {}).get(QUEUE_LABEL)
    known = [name(one) for one in facts.local_queues]
    if label is None:
        text = "Kueue does not manage it: the RayJob has no queue label"
        action = "cancel it, for it bypasses every quota, and launch it with gkr"
        return Verdict(Level.QUEUED, text, "change", (f"the label {QUEUE_LABEL} is missing",), action=action)
    if label not in known:
        return _no_queue(Level.QUEUED, label, facts=facts)
    text = "Kueue has made no Workload for it yet"
    evidence = (f"queue {label} is there; a healthy Kueue needs a second",)
    action = "if it stays so, an administrator has to see whether Kueue runs and whether it manages RayJobs here"
    return Verdict(Level.QUEUED, text, "wait", evidence, action=action)


def quota(facts: Facts) -> Verdict | None:
    """Level 3: quota is reserved, and a place in the topology, for all its pods together."""
    workload = facts.workload
    assert workload is not None, "level 2 comes first"
    if holds(workload, "QuotaReserved"):
        return None
    reserved = sub(condition(workload, "QuotaReserved"))
    obstacle = read_message(str(reserved.get("reason") or ""), message=str(reserved.get("message") or ""))
    if obstacle.cause in {"flavor", "unknown"} and obstacle.words:
        obstacle = reckon(facts, workload, obstacle)
    if spec(workload).get("active") is False or obstacle.cause == "held":
        text = "it is held: its Workload is deactivated"
        return _plain(facts, obstacle, text, "change", action="set it active again, or cancel it")
    if obstacle.cause == "unused quota" and obstacle.flavor:
        return _waits_for_quota(facts, workload, obstacle)
    if obstacle.cause == "maximum" and obstacle.flavor:
        return _asks_too_much(facts, obstacle)
    if obstacle.cause == "topology":
        return no_place(facts, level=Level.QUOTA, pod_set=obstacle.pod_set, words=f"Kueue: {obstacle.words}")
    if obstacle.cause == "queue":
        return _queue_is_shut(facts, obstacle)
    return _plain(facts, obstacle, *_OTHER[obstacle.cause if obstacle.cause in _OTHER else "unknown"])


_OTHER: dict[str, tuple[str, Remedy, str]] = {
    "unused quota": ("it waits for quota that others use", "wait", "wait; `gkr queues` shows who holds it"),
    "maximum": ("it asks for more than its queue has in all", "change", "ask for less: `gkr queues` shows the quota"),
    "preemption": ("experiments of lower priority are being stopped for it", "wait", "wait: this takes seconds"),
    "flavor": ("its queue has no machine of the kind it asks for", "change", "`gkr queues` shows what the queue has"),
    "ready": ("Kueue holds it back until the pods of an earlier one are ready", "wait", "wait"),
    "unknown": ("Kueue has not admitted it yet", "wait", "wait, and ask again in a minute"),
}


def checks(facts: Facts) -> Verdict | None:
    """Level 4: every admission check agreed."""
    workload = facts.workload
    assert workload is not None, "level 2 comes first"
    if holds(workload, "Admitted"):
        return None
    waiting: list[Object] = [one for one in subs(status(workload), "admissionChecks") if one.get("state") != "Ready"]
    evidence = tuple(
        f"{one.get('name')}: {one.get('state')} {one.get('message') or ''}".rstrip() for one in waiting[:3]
    )
    names = listed([str(one.get("name")) for one in waiting]) or "Kueue's second look at the topology"
    numbers = {"checks": float(len(waiting))}
    if any(one.get("state") == "Rejected" for one in waiting):
        text, action = f"admission check {names} refuses it", "an administrator knows what the check wants"
        return Verdict(Level.CHECKS, text, "admin", evidence, action=action, numbers=numbers)
    return Verdict(
        Level.CHECKS, f"it has quota and waits for {names}", "wait", evidence, action="wait", numbers=numbers
    )


def _waits_for_quota(facts: Facts, workload: Object, obstacle: Obstacle) -> Verdict:
    resource = obstacle.resource
    wanted = asked(workload, resource)
    numbers = {"asked": wanted, "more_needed": obstacle.amount, **_place_numbers(facts)}
    first = f"asks for {amount_of(wanted, resource)}"
    for row in quotas(facts.cluster_queue or {}):
        if (row.flavor, row.resource) == (obstacle.flavor, resource):
            numbers |= {"quota": row.nominal, "used": row.used, "free": row.free}
            quota, used, free = (amount_of(one, resource) for one in (row.nominal, row.used, row.free))
            first += f"; quota {quota}, in use {used}, free {free}"
    held = holders(facts, flavor=obstacle.flavor, resource=resource)
    evidence = (first, holders_line(held, resource=resource, now=facts.now), _place_line(facts))
    text = f"it waits for quota: {amount_of(obstacle.amount, resource)} more of {obstacle.flavor} needed"
    action = what_frees(facts, obstacle)
    return Verdict(Level.QUOTA, text, "wait", tuple(filter(None, evidence)), action=action, numbers=numbers)


def _asks_too_much(facts: Facts, obstacle: Obstacle) -> Verdict:
    queue = _queue_name(facts)
    wanted, most = amount_of(obstacle.amount, obstacle.resource), amount_of(obstacle.most, obstacle.resource)
    text = f"it can never be admitted: it asks for {wanted}, queue {queue} has {most} in all"
    evidence = (f"pod set {obstacle.pod_set}, flavor {obstacle.flavor}", f"Kueue: {obstacle.words}")
    action = f"ask for at most {most} in this learner, or have the quota of {queue} raised"
    numbers = {"asked": obstacle.amount, "quota": obstacle.most}
    return Verdict(Level.QUOTA, text, "change", evidence, action=action, numbers=numbers)


def _queue_is_shut(facts: Facts, obstacle: Obstacle) -> Verdict:
    if obstacle.words.startswith("LocalQueue") and "doesn't exist" in obstacle.words:
        return _no_queue(Level.QUOTA, facts.queue, facts=facts)
    reason = inactive(facts.cluster_queue) if facts.cluster_queue is not None else ""
    evidence = (f"Kueue: {obstacle.words}", f"queue {_queue_name(facts)}: {reason}" if reason else "")
    action = f"an administrator has to open queue {_queue_name(facts)}"
    return Verdict(Level.QUOTA, "its queue takes nobody", "admin", tuple(filter(None, evidence)), action=action)


def _no_queue(level: Level, queue: str, *, facts: Facts) -> Verdict:
    known = ", ".join(name(one) for one in facts.local_queues)
    text = f'there is no queue "{queue}" in namespace {facts.namespace}'
    action = "name one of these as `queue:`" if known else "an administrator has to make a queue in this namespace"
    remedy: Remedy = "change" if known else "admin"
    return Verdict(level, text, remedy, (f"queues there: {known or 'none'}",), action=action)


def _plain(facts: Facts, obstacle: Obstacle, text: str, remedy: Remedy, action: str) -> Verdict:
    evidence = (f"Kueue: {obstacle.words}" if obstacle.words else "", _place_line(facts))
    numbers = _place_numbers(facts)
    return Verdict(Level.QUOTA, text, remedy, tuple(filter(None, evidence)), action=action, numbers=numbers)


def _queue_name(facts: Facts) -> str:
    return name(facts.cluster_queue) if facts.cluster_queue is not None else facts.queue


def _place(facts: Facts) -> tuple[int, int] | None:
    """Its place among those that wait in its ClusterQueue, from 1 on, and how many they are."""
    waiting = [one for one in facts.workloads if admission(one) is None]
    ordered = order(waiting, pending=facts.pending)
    for at, (one, position) in enumerate(ordered, start=1):
        if one is facts.workload or name(one) == name(facts.workload or {}):
            return position or at, len(ordered)
    return None


def _place_line(facts: Facts) -> str:
    place = _place(facts)
    return f"number {place[0]} of {place[1]} that wait in queue {_queue_name(facts)}" if place else ""


def _place_numbers(facts: Facts) -> dict[str, float]:
    place = _place(facts)
    return {"position": place[0], "waiting": place[1]} if place else {}
