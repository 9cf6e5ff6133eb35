"""Level 7: everything was started; does Ray's head serve, are all workers there, what does the run say? Pure.

Serves runs on this machine too, which have no pods: their own events are all there is to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from gkr.cluster.explain_facts import Facts, Level, Remedy, Verdict
from gkr.cluster.explain_objects import (
    Object,
    group,
    labels,
    leaving,
    listed,
    name,
    node_of,
    phase,
    plural,
    ready,
    seconds,
    status,
    sub,
    subs,
)
from gkr.cluster.explain_start import event_time
from gkr.runs import FINAL
from gkr.watch.text import short_duration
from manifests.labels import ROLE
from spec.events import (
    AttemptEnded,
    AttemptStarted,
    Check,
    Event,
    Preflight,
    Restored,
    RunStatus,
    StepMetrics,
    SyncWaiting,
)  # fmt: skip

HEAD_PATIENCE_SECONDS = 120.0
START_PATIENCE_SECONDS = 600.0
SILENCE_SECONDS = 120.0
SILENT_STEPS = 50.0
"""Silence counts from so many of its own steps on, at least SILENCE_SECONDS."""

E = TypeVar("E", bound=Event)


def running(facts: Facts) -> Verdict:
    """Level 7, and the end of the way down: there is always an answer."""
    here = [pod for pod in facts.pods if not leaving(pod)]
    if not facts.job:
        return _syncing(facts, here)
    return head_waits(facts, here) or _missing(facts, here) or _ray(facts) or happening(facts)


def crashed(facts: Facts) -> Verdict | None:
    """A container that ended badly, also under a pod that is restarted again and again.

    Asked before level 6: what else does not start waits for it.
    """
    pods = [pod for pod in facts.pods if not leaving(pod)]
    bad: list[tuple[Object, Object, Object]] = []
    for pod in pods:
        for one in subs(status(pod), "containerStatuses"):
            waiting = sub(one, "state", "waiting")
            last: Object | None = sub(one, "state").get("terminated")
            if waiting.get("reason") == "CrashLoopBackOff":
                last = sub(one, "lastState", "terminated")
            if last is not None and (last.get("exitCode") != 0 or waiting):
                bad.append((pod, one, last))
    if not bad:
        evicted = [pod for pod in pods if phase(pod) == "Failed"]
        return _evicted(evicted) if evicted else None
    pod, one, last = min(bad, key=lambda each: seconds(each[2].get("finishedAt")) or float("inf"))
    reason, code = str(last.get("reason") or ""), last.get("exitCode", "?")
    text = f"the container of {name(pod)} ended with code {code}" + (
        f" ({reason})" if reason not in {"", "Error"} else ""
    )
    restarts = int(one.get("restartCount") or 0)
    said = str(last.get("message") or "").strip().splitlines()
    evidence = (
        f"on {node_of(pod)}, group {group(pod)}, {plural(restarts, 'restart')}; {plural(len(bad), 'pod')} in all",
        said[-1] if said else "",
    )
    action = f"`gkr logs RUN --pod {name(pod)} --prev` shows what it printed"
    if reason == "OOMKilled":
        action = f"it needs more memory than it asked for: raise `memory:` of group {group(pod)}"
    numbers = {
        "exit_code": float(code) if isinstance(code, int) else -1.0,
        "restarts": float(restarts),
        "pods": len(bad),
    }
    return Verdict(Level.RUNNING, text, "change", tuple(filter(None, evidence)), action=action, numbers=numbers)


def _evicted(pods: Sequence[Object]) -> Verdict:
    pod = pods[0]
    reason, message = str(status(pod).get("reason") or "Failed"), str(status(pod).get("message") or "")
    text = f"pod {name(pod)} was ended by its node: {reason}"
    evidence = tuple(filter(None, (message, f"on {node_of(pod)}; {plural(len(pods), 'pod')} in all")))
    return Verdict(Level.RUNNING, text, "wait", evidence, action="wait: it is replaced; `gkr nodes` shows the node")


def head_waits(facts: Facts, pods: Sequence[Object]) -> Verdict | None:
    """Ray's head runs and does not serve yet; until it does, workers stay in their init containers."""
    head = next((pod for pod in pods if _role(pod) == "head" and phase(pod) == "Running"), None)
    if head is None or ready(head):
        return None
    since = facts.now - (seconds(status(head).get("startTime")) or facts.now)
    uid = sub(head, "metadata").get("uid")
    probes = [
        one for one in facts.events if one.get("reason") == "Unhealthy" and sub(one, "involvedObject").get("uid") == uid
    ]
    last = max(probes, key=event_time, default=None)
    evidence = (
        f"pod {name(head)} on {node_of(head)} runs since {short_duration(since)}",
        f"kubelet: {last.get('message')}" if last is not None else "",
    )
    late = since > HEAD_PATIENCE_SECONDS
    action = "`gkr logs RUN --role head` shows why" if late else "wait: a head needs about ten seconds"
    remedy: Remedy = "change" if late else "wait"
    text = "Ray's head is not ready yet"
    return Verdict(
        Level.RUNNING, text, remedy, tuple(filter(None, evidence)), action=action, numbers={"seconds": since}
    )


def _missing(facts: Facts, pods: Sequence[Object]) -> Verdict | None:
    serving = Counter(group(pod) for pod in pods if ready(pod))
    expected = facts.expected or Counter(group(pod) for pod in pods)
    short = {one: count - serving[one] for one, count in expected.items() if serving[one] < count}
    if not short:
        return None
    parts = [f"{serving[one]} of {expected[one]} of group {one}" for one in short]
    there = Counter(group(pod) for pod in pods)
    absent = sum(max(0, count - there[one]) for one, count in expected.items())
    unready = [f"{name(pod)} on {node_of(pod)}" for pod in pods if not ready(pod)]
    warnings = sorted((one for one in facts.events if one.get("type") == "Warning"), key=event_time)
    evidence = (
        f"not ready: {listed(unready)}" if unready else "",
        f"{plural(absent, 'pod')} not made yet" if absent > 0 else "",
        f"{warnings[-1].get('reason')}: {warnings[-1].get('message')}" if warnings else "",
    )
    numbers = {"ready": float(sum(serving.values())), "expected": float(sum(expected.values()))}
    text = f"pods are ready: {listed(parts)}"
    action = "wait; `gkr logs RUN` shows what they do"
    return Verdict(Level.RUNNING, text, "wait", tuple(filter(None, evidence))[:3], action=action, numbers=numbers)


def _ray(facts: Facts) -> Verdict | None:
    if facts.rayjob is None or facts.happened:
        return None
    found = str(status(facts.rayjob).get("jobStatus") or "")
    if found == "RUNNING":
        return None
    evidence = (
        f"Ray's job: {found or 'not submitted yet'}; KubeRay: {status(facts.rayjob).get('jobDeploymentStatus')}",
    )
    text = "all pods are ready, and Ray has not started the driver yet"
    return Verdict(Level.RUNNING, text, "wait", evidence, action="wait: this takes seconds")


def _syncing(facts: Facts, pods: Sequence[Object]) -> Verdict:
    """The syncer: which round is open, and for whom it waits."""
    if any(phase(pod) == "Succeeded" for pod in pods):
        return Verdict(Level.RUNNING, "it has ended: succeeded", "none")
    unready = [pod for pod in pods if not ready(pod)]
    if unready:
        return _missing(facts, pods) or Verdict(Level.RUNNING, "it is not ready yet", "wait", action="wait")
    waiting = _last(facts.happened, SyncWaiting)
    if waiting is None:
        return Verdict(Level.RUNNING, "nothing blocks it: it waits for the first weights", "none")
    evidence = (f"outer round {waiting.round}: {', '.join(waiting.arrived) or 'nobody'} arrived",)
    numbers = {"round": waiting.round, "arrived": len(waiting.arrived), "waiting_for": len(waiting.waiting_for)}
    if waiting.waiting_for and waiting.arrived:
        text = f"it waits for the weights of {', '.join(waiting.waiting_for)}"
        return Verdict(Level.RUNNING, text, "wait", evidence, action="see what these learners do", numbers=numbers)
    return Verdict(Level.RUNNING, "nothing blocks it: it serves", "none", evidence, numbers=numbers)


def happening(facts: Facts) -> Verdict:
    """What the run itself wrote last."""
    over = _last(facts.happened, RunStatus)
    if over is not None and over.status in FINAL:
        action = "`gkr logs RUN --failed` shows the process that failed first" if over.status == "failed" else ""
        text = f"it has ended: {over.status}"
        return Verdict(Level.RUNNING, text, "none", tuple(filter(None, (over.reason,))), action=action)
    start, end = _last(facts.happened, AttemptStarted), _last(facts.happened, AttemptEnded)
    if start is None or (end is not None and end.time > start.time):
        return _preflight(facts, since=end.time if end else 0.0) or _before_attempt(facts, end)
    step = _last(facts.happened, StepMetrics)
    if step is None or step.time < start.time:
        return _no_step(facts, start)
    return _waits_for_others(facts, step) or _stepping(facts, step)


def ended(facts: Facts) -> bool:
    """The run itself said how it ended."""
    over = _last(facts.happened, RunStatus)
    return over is not None and over.status in FINAL


def _preflight(facts: Facts, *, since: float) -> Verdict | None:
    done = [one for one in facts.happened if isinstance(one, Preflight) and one.time >= since]
    failed = [(one.node, check) for one in done for check in one.checks if check.verdict == "FAIL"]
    if not failed:
        return None
    evidence = tuple(f"{node}: {_check(check)}" for node, check in failed[:3])
    nodes = len({node for node, _ in failed})
    hints = [check.hint for _, check in failed if check.hint]
    numbers = {"nodes_failed": float(nodes), "nodes_checked": float(len({one.node for one in done}))}
    text = f"preflight failed on {plural(nodes, 'node')}"
    action = hints[0] if hints else "an administrator has to look at the nodes"
    return Verdict(Level.RUNNING, text, "admin", evidence, action=action, numbers=numbers)


def _before_attempt(facts: Facts, end: AttemptEnded | None) -> Verdict:
    nodes = sum(count for one, count in facts.expected.items() if one != "head" and not one.startswith("svc-"))
    passed = {one.node for one in facts.happened if isinstance(one, Preflight) and (end is None or one.time > end.time)}
    numbers = {"nodes_passed": float(len(passed)), "nodes": float(nodes)}
    of = f" of {nodes}" if nodes else ""
    evidence = [f"{len(passed)}{of} nodes have passed preflight"]
    last = max((one.time for one in facts.happened), default=None)
    if last is not None:
        evidence.append(f"its last event came {short_duration(facts.now - last)} ago")
        numbers["seconds"] = facts.now - last
    if end is not None:
        text = f"attempt {end.attempt} ended ({end.cause}); the driver starts the next one"
    else:
        text = "the driver waits for its agents"
    return Verdict(
        Level.RUNNING, text, "wait", tuple(evidence), action="wait; `gkr logs RUN` shows it", numbers=numbers
    )


def _no_step(facts: Facts, start: AttemptStarted) -> Verdict:
    age = facts.now - start.time
    restored = _last(facts.happened, Restored)
    state = (
        f"state: {restored.mode}, step {restored.step}"
        if restored and restored.time > start.time
        else "state not read yet"
    )
    late = age > START_PATIENCE_SECONDS
    text = f"attempt {start.attempt} started {short_duration(age)} ago, and no step is done yet"
    action = "`gkr logs RUN` shows where rank 0 stands" if late else "wait: ranks load their state and compile"
    return Verdict(
        Level.RUNNING, text, "change" if late else "wait", (f"{plural(start.world_size, 'rank')}; {state}",),
        action=action, numbers={"attempt": start.attempt, "seconds": age},
    )  # fmt: skip


def _waits_for_others(facts: Facts, step: StepMetrics) -> Verdict | None:
    waiting = _last(facts.happened, SyncWaiting)
    if waiting is None or facts.learner not in waiting.arrived or not waiting.waiting_for:
        return None
    if waiting.time < step.time:
        return None  # it trains on meanwhile
    age = facts.now - waiting.time
    until = (
        f"; the round closes without them in {short_duration(waiting.deadline - facts.now)}" if waiting.deadline else ""
    )
    text = f"it waits in outer round {waiting.round} for the weights of {', '.join(waiting.waiting_for)}"
    evidence = (f"for {short_duration(age)}{until}", f"its own step {step.step} is done")
    numbers = {"round": waiting.round, "seconds": age}
    return Verdict(
        Level.RUNNING, text, "wait", evidence, action="`gkr why` says what these learners do", numbers=numbers
    )


def _stepping(facts: Facts, step: StepMetrics) -> Verdict:
    silence = facts.now - step.time
    numbers = {"step": float(step.step), "seconds": silence, "steps_per_second": step.steps_per_second}
    evidence = (f"step {step.step}, {step.steps_per_second:.3g} steps/s, last word {short_duration(silence)} ago",)
    patience = max(SILENCE_SECONDS, SILENT_STEPS / step.steps_per_second if step.steps_per_second > 0 else 0.0)
    if silence > patience:
        text = f"rank 0 has been silent for {short_duration(silence)}"
        action = "`gkr logs RUN` shows where it stands; the driver ends a hung attempt by itself"
        return Verdict(Level.RUNNING, text, "change", evidence, action=action, numbers=numbers)
    return Verdict(Level.RUNNING, "nothing blocks it: it trains", "none", evidence, numbers=numbers)


def _check(check: Check) -> str:
    said = f"; {check.evidence}" if check.evidence else ""
    return f"{check.name} is {check.value}, wanted {check.threshold}{said}"


def _role(pod: Object) -> str:
    own = labels(pod)
    return own.get(ROLE) or own.get("ray.io/node-type") or ""


def _last(events: Sequence[Event], kind: type[E]) -> E | None:
    return next((one for one in reversed(events) if isinstance(one, kind)), None)
