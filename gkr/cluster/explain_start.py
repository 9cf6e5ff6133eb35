"""Level 6: pods have nodes; are their images there, their volumes mounted, their init containers through? Pure.

Old warnings mislead: one about a pod counts only while nothing newer and good was said about the same pod.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gkr.cluster.explain_facts import Facts, Level, Remedy, Verdict
from gkr.cluster.explain_objects import (
    Object,
    called,
    group,
    leaving,
    meta,
    name,
    node_of,
    phase,
    plural,
    seconds,
    spec,
    status,
    sub,
    subs,
)
from gkr.watch.text import short_duration

_IMAGE = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CREATE = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreStartHookError"})
_MOUNT = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_SANDBOX = frozenset({"FailedCreatePodSandBox", "NetworkNotReady", "FailedPodSandBoxStatus"})
_GOOD = frozenset({"Pulled", "Created", "Started", "SuccessfulAttachVolume"})
_RPC = re.compile(r"rpc error: code = \w+ desc = ")
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*":?\s*')
_WAITS_FOR_HEAD = "wait-gcs-ready"
_LONGEST = 400


@dataclass(frozen=True)
class _Waiting:
    """A container that waits."""

    pod: Object
    container: str
    image: str
    reason: str
    message: str


def started(facts: Facts) -> Verdict | None:
    """Level 6: every pod that has a node runs."""
    here = [pod for pod in facts.pods if node_of(pod) and not leaving(pod) and phase(pod) == "Pending"]
    if not here:
        return None
    waiting = [one for pod in here for one in _waiting(pod)]
    for reasons, judge in ((_IMAGE, _image), (_CREATE, _create), ({"CrashLoopBackOff"}, _init_crashes)):
        found = [one for one in waiting if one.reason in reasons]
        if found:
            return judge(facts, found, pods=len(here))
    verdict = _by_event(facts, here) or _init_runs(here, now=facts.now)
    return verdict or (None if all(map(_waits_for_head, here)) else _starting(facts, here))


def image_words(message: str, events: Iterable[Object] = (), *, pod: str = "") -> str:
    """What the container runtime said, without the layers of its callers."""
    words = _BACK_OFF.sub("", message).removeprefix("ErrImagePull: ")
    if not words:
        for one in events:
            about = sub(one, "involvedObject").get("name")
            text = str(one.get("message") or "")
            if about == pod and one.get("reason") == "Failed" and text.startswith("Failed to pull image"):
                words = text.partition(": ")[2]
                break
    words = _RPC.sub("", words)
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."


def image_remedy(reason: str, words: str) -> tuple[str, Remedy, str]:
    """What is wrong with an image, who mends it and how."""
    low = words.lower()
    if reason == "InvalidImageName":
        return "its name is not valid", "change", "mend `image:`; a name is REGISTRY/PATH:TAG or REGISTRY/PATH@DIGEST"
    if reason == "ErrImageNeverPull":
        return "the node does not have it and may not pull it", "change", "name an image that the nodes have"
    if any(text in low for text in ("unauthorized", "forbidden", "denied", "authentication required", " 401", " 403")):
        return "the registry refuses the pull", "admin", "check the name; else an administrator has to give the right"
    if "not found" in low or "manifest unknown" in low or "does not exist" in low:
        return "there is no such image", "change", "mend `image:`, or build and push it, then launch again"
    if "no match for platform" in low or "exec format" in low:
        return "it is for another kind of processor", "change", "build it for linux/amd64"
    if any(text in low for text in ("timeout", "no such host", "refused", "unreachable", "x509", "tls", "eof")):
        return (
            "its registry cannot be reached from the node",
            "admin",
            "check the registry's name in `image:`, then the network",
        )
    if "no space left" in low:
        return "the node's disk is full", "admin", "an administrator has to free the node's disk"
    return "it cannot be pulled", "change", "mend `image:` as the runtime says"


def _image(facts: Facts, found: Sequence[_Waiting], *, pods: int) -> Verdict:
    one = max(found, key=lambda each: len(image_words(each.message, facts.events, pod=name(each.pod))))
    words = image_words(one.message, facts.events, pod=name(one.pod))
    what, remedy, action = image_remedy(one.reason, words)
    own = status(one.pod).get("startTime")
    since = facts.now - (seconds(own) or facts.now)
    evidence = (
        f"runtime: {words}" if words else f"kubelet: {one.reason}",
        f"{plural(len({name(each.pod) for each in found}), 'pod')} of group {group(one.pod)}, "
        f"for example {name(one.pod)} on {node_of(one.pod)}, for {short_duration(since)}",
    )
    numbers = {"pods": float(len(found)), "pending": float(pods), "seconds": since}
    return Verdict(Level.STARTED, f"image {one.image}: {what}", remedy, evidence, action=action, numbers=numbers)


def _create(facts: Facts, found: Sequence[_Waiting], *, pods: int) -> Verdict:
    one = found[0]
    missing = re.search(r'(secret|configmap) "([^"]+)" not found', one.message)
    text = f"container {one.container} of {name(one.pod)} cannot be made ({one.reason})"
    action = "see the runtime's words"
    if missing is not None:
        text = f"{missing[1]} {missing[2]} is not in namespace {facts.namespace}"
        action = f"make it there, or take it out of the experiment; {plural(len(found), 'pod')} wait for it"
    evidence = (f"kubelet: {_short(one.message)}", f"pod {name(one.pod)} on {node_of(one.pod)}")
    numbers = {"pods": float(len(found)), "pending": float(pods)}
    return Verdict(Level.STARTED, text, "change", evidence, action=action, numbers=numbers)


def _init_crashes(facts: Facts, found: Sequence[_Waiting], *, pods: int) -> Verdict:
    del facts
    one = found[0]
    own = called(subs(one.pod, "status", "initContainerStatuses"), one.container)
    last = sub(own, "lastState", "terminated")
    text = f"init container {one.container} fails again and again on {name(one.pod)}"
    said = str(last.get("message") or "").strip()
    code, reason, restarts = last.get("exitCode", "?"), last.get("reason") or "no reason", own.get("restartCount", 0)
    evidence = (
        f"exit code {code} ({reason}), {restarts} restarts",
        _short(said.splitlines()[-1]) if said else "",
    )
    action = f"`gkr logs RUN --pod {name(one.pod)} --container {one.container} --prev` shows what it printed"
    numbers = {"restarts": float(own.get("restartCount") or 0), "pending": float(pods)}
    return Verdict(Level.STARTED, text, "change", tuple(filter(None, evidence)), action=action, numbers=numbers)


def _by_event(facts: Facts, pods: Sequence[Object]) -> Verdict | None:
    """A warning that is still true: mounts and sandboxes say what is wrong with them only as events."""
    for pod in pods:
        warning = last_warning(facts.events, pod=pod, reasons=_MOUNT | _SANDBOX)
        if warning is None:
            continue
        volume = warning.get("reason") in _MOUNT
        what = "a volume cannot be mounted" if volume else "its network or sandbox cannot be made"
        evidence = (f"kubelet: {_short(str(warning.get('message')))}", f"pod {name(pod)} on {node_of(pod)}")
        action = (
            "check the names of secrets and volumes in the experiment" if volume else "tell an administrator the node"
        )
        text = f"{what} on {node_of(pod)}"
        return Verdict(Level.STARTED, text, "change" if volume else "admin", evidence, action=action)
    return None


def last_warning(events: Sequence[Object], *, pod: Object, reasons: Iterable[str]) -> Object | None:
    """The newest warning about a pod with one of the reasons, unless something good was said after it."""
    wanted = set(reasons)
    uid = meta(pod).get("uid")
    about = [one for one in events if sub(one, "involvedObject").get("uid") == uid]
    for one in sorted(about, key=event_time, reverse=True):
        if one.get("reason") in wanted:
            return one
        if one.get("type") == "Normal" and one.get("reason") in _GOOD:
            return None
    return None


def event_time(event: Object) -> float:
    """When it was last seen."""
    series = sub(event, "series")
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((found for text in times if (found := seconds(text)) is not None), 0.0)


def _init_runs(pods: Sequence[Object], *, now: float) -> Verdict | None:
    running: dict[str, list[tuple[Object, float]]] = defaultdict(list)
    for pod in pods:
        for one in subs(status(pod), "initContainerStatuses"):
            since = seconds(sub(one, "state", "running").get("startedAt"))
            if since is not None:
                running[str(one.get("name"))].append((pod, now - since))
    if not running:
        return None
    container, members = max(running.items(), key=lambda item: len(item[1]))
    pod, longest = max(members, key=lambda pair: pair[1])
    if container == _WAITS_FOR_HEAD:
        return None
    evidence = (f"longest: {name(pod)} on {node_of(pod)}, for {short_duration(longest)}",)
    text = f"{plural(len(members), 'pod')} of group {group(pod)} run init container {container}"
    return Verdict(Level.STARTED, text, "wait", evidence, action="wait", numbers={"seconds": longest})


def _waits_for_head(pod: Object) -> bool:
    """KubeRay's init container: the head is what to look at."""
    statuses = subs(status(pod), "initContainerStatuses")
    return any(one.get("name") == _WAITS_FOR_HEAD and "running" in sub(one, "state") for one in statuses)


def _starting(facts: Facts, pods: Sequence[Object]) -> Verdict:
    """Nothing is wrong, it only takes its time: mostly the image."""
    uids = {meta(pod).get("uid") for pod in pods}
    pulling = [
        one for one in facts.events if one.get("reason") == "Pulling" and sub(one, "involvedObject").get("uid") in uids
    ]
    since = max(facts.now - (seconds(status(pod).get("startTime")) or facts.now) for pod in pods)
    of_all = f"{len(pods)} of {plural(len(facts.pods), 'pod')}"
    if pulling:
        last = max(pulling, key=event_time)
        evidence = (f"{last.get('message')}, {short_duration(facts.now - event_time(last))} ago",)
        text, action = f"{of_all} pull their image", "wait: a large image takes minutes on a new node"
    else:
        evidence = (f"for example {name(pods[0])} on {node_of(pods[0])}, placed {short_duration(since)} ago",)
        text, action = f"{of_all} are being started", "wait"
    return Verdict(Level.STARTED, text, "wait", evidence, action=action, numbers={"pods": len(pods), "seconds": since})


def _waiting(pod: Object) -> list[_Waiting]:
    found: list[_Waiting] = []
    for key, containers in (("initContainerStatuses", "initContainers"), ("containerStatuses", "containers")):
        images = {one.get("name"): str(one.get("image") or "") for one in subs(spec(pod), containers)}
        for one in subs(status(pod), key):
            state = sub(one, "state").get("waiting")
            if state is not None:
                own = str(one.get("name"))
                image = images.get(own) or str(one.get("image") or "")
                reason, message = str(state.get("reason") or ""), str(state.get("message") or "")
                found.append(_Waiting(pod, own, image, reason, message))
    return found


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
