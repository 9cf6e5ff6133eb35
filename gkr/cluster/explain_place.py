"""Level 5 and the topology part of level 3: is there a node for every pod, and if not, what the free GPUs look like.

Pure. The scheduler counts nodes per reason; whether GPUs are short or only scattered is seen on the nodes themselves.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gkr.cluster.capacity import ACCELERATOR_LABELS, Node, gpu_token
from gkr.cluster.explain_facts import Facts, Level, Remedy, Verdict
from gkr.cluster.explain_objects import (
    GPU,
    Object,
    condition,
    group,
    labels,
    leaving,
    listed,
    name,
    node_of,
    plural,
    pod_gpus,
    spec,
    sub,
    subs,
)

_HEAD = re.compile(r"^(?P<fit>\d+)/(?P<all>\d+) nodes are available:\s*")
_COUNT = re.compile(r"^(?P<count>\d+) (?P<cause>.+)$", re.DOTALL)
_LONGEST_WORDS = 300


@dataclass(frozen=True)
class Need:
    """Equal pods that want nodes."""

    group: str
    pods: int
    gpus: int
    """Of each pod."""
    gpu: str
    """GPU type they insist on; empty if any."""
    spread: str = ""
    """Topology level within which all must be placed; empty if that is no must."""

    def __str__(self) -> str:
        return f"group {self.group} needs {plural(self.pods, 'node')} with {self.gpus} free {self.gpu or 'GPU'} each"


def placed(facts: Facts) -> Verdict | None:
    """Level 5: every pod has a node."""
    here = [pod for pod in facts.pods if not leaving(pod)]
    if not here:
        return _no_pods(facts)
    homeless = [pod for pod in here if not node_of(pod)]
    if not homeless:
        return None
    by_group: dict[str, list[Object]] = defaultdict(list)
    for pod in homeless:
        by_group[group(pod)].append(pod)
    most = max(by_group.values(), key=lambda pods: (pod_gpus(spec(pods[0])), len(pods)))
    return _unplaced(facts, most, placed_pods=len(here) - len(homeless))


def no_place(facts: Facts, *, level: Level, pod_set: str, words: str) -> Verdict:
    """Kueue has quota for a pod set, but its topology has no place for all its pods together."""
    need = pod_set_need(facts.workload or {}, pod_set)
    if need is None or not need.gpus:
        text = f"there is no place for all pods of {pod_set or 'one group'} together"
        return Verdict(level, text, "wait", (_short(words),), action="wait; `gkr nodes` shows what is free")
    return scattered(need, facts.nodes, level=level, words=words)


def scattered(need: Need, nodes: Sequence[Node], *, level: Level, words: str) -> Verdict:
    """What the free GPUs of the cluster look like to a group that does not fit."""
    fitting = [node for node in nodes if node.gpu and need.gpu in ("", node.gpu)]
    kind = need.gpu or "GPU"
    free, largest = sum(node.free for node in fitting), max((node.free for node in fitting), default=0)
    whole = sum(node.free >= need.gpus for node in fitting)
    able = sum(node.usable and node.gpus >= need.gpus for node in fitting)
    broken = sum(node.broken for node in fitting)
    numbers = {
        "pods": need.pods, "gpus_per_pod": need.gpus, "free": free, "largest_on_node": largest, "nodes_that_fit": whole,
        "nodes_with_free": sum(node.free > 0 for node in fitting), "broken": broken,
    }  # fmt: skip
    spread = f"{free} {kind} free in all on {plural(numbers['nodes_with_free'], 'node')}, at most {largest} on one node"
    first = f"{need}; {spread}" + (f"; {broken} broken" if broken else "")
    evidence = tuple(filter(None, (first, _nearest(need, fitting), _short(words))))
    text, remedy, action = _judgement(need, fitting, free=free, largest=largest, whole=whole, able=able)
    return Verdict(level, text, remedy, evidence, action=action, numbers=numbers)


def _judgement(
    need: Need, nodes: Sequence[Node], *, free: int, largest: int, whole: int, able: int
) -> tuple[str, Remedy, str]:
    kind = need.gpu or "GPU"
    if not nodes:
        return f"the cluster has no node with {kind}", "change", "`gkr gpus` lists the GPU types of each cluster"
    biggest = max(node.gpus for node in nodes)
    if need.gpus > biggest:
        action = f"ask for at most {kind}:{biggest} per node, and for more nodes"
        return f"no node has {need.gpus} {kind}: the largest has {biggest}", "change", action
    widest = _widest(need, nodes)
    if need.spread and widest < need.pods:
        text = f"it insists on {plural(need.pods, 'node')} within one {need.spread}, which has at most {widest}"
        return text, "change", f"ask for at most {plural(widest, 'node')}, or let the group span several"
    if able < need.pods:
        out = [node for node in nodes if not node.usable]
        if able + len(out) >= need.pods:
            broken = listed([f"{node.name} ({node.state})" for node in out])
            text = f"too few healthy nodes: {able} can take {need.gpus} {kind}, {need.pods} are needed"
            return text, "admin", f"an administrator has to bring back {broken}"
        text = f"the cluster has {plural(able, 'node')} for {need.gpus} {kind} each, {need.pods} are asked for"
        return text, "change", f"ask for at most {plural(able, 'node')}"
    wait = f"wait until whole nodes are free{_who(need, nodes)}"
    if whole >= need.pods:
        if need.spread:
            text = f"enough nodes are free, but not within one {need.spread}"
            return text, "wait", f"{wait}, or ask for fewer nodes"
        text = "GPUs are free, but something else on the nodes is not"
        return text, "change", "see what the scheduler says; `gkr nodes` shows the nodes"
    if free >= need.gpus * need.pods and largest:
        text = f"{free} {kind} are free, but scattered: at most {largest} on one node, {need.gpus} are asked for on one"
        smaller = f"ask for less per node: `resources: {{gpu: {kind}:{largest}}}`"
        count = sum(node.free // largest for node in nodes)
        return text, "wait", f"{wait}, or {smaller}, of which {count} fit now"
    return f"too few {kind} are free: {free} of {need.gpus * need.pods}", "wait", wait


def pod_set_need(workload: Object, pod_set: str) -> Need | None:
    """What a pod set of a Workload asks for; the one with most GPUs if none has that name."""
    found = subs(workload, "spec", "podSets")
    named = [one for one in found if one.get("name") == pod_set] or found
    if not named:
        return None
    one = max(named, key=lambda each: pod_gpus(sub(each, "template", "spec")))
    template: Object = sub(one, "template")
    required = str(sub(one, "topologyRequest").get("required") or "")
    return Need(
        group=group(template) if labels(template) else str(one.get("name")),
        pods=int(one.get("count", 1)),
        gpus=pod_gpus(sub(template, "spec")),
        gpu=wanted_gpu(sub(template, "spec")),
        spread=required.rpartition("-")[2].rpartition("/")[2],
    )


def wanted_gpu(pod_spec: Object) -> str:
    """The GPU type that a pod's node selector or required affinity names; empty if none."""
    for key, value in sub(pod_spec, "nodeSelector").items():
        if key in ACCELERATOR_LABELS:
            return gpu_token(str(value))
    affinity = sub(pod_spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in subs(affinity, "nodeSelectorTerms"):
        for one in subs(term, "matchExpressions"):
            values: list[str] = one.get("values") or []
            if one.get("key") in ACCELERATOR_LABELS and one.get("operator") == "In" and len(values) == 1:
                return gpu_token(str(values[0]))
    return ""


def read_scheduler(message: str) -> tuple[int, dict[str, int]]:
    """Nodes in all and how many of them each cause rules out, from the scheduler's words."""
    head = _HEAD.match(message)
    if head is None:
        return 0, {}
    body = message[head.end() :].partition(" preemption: ")[0].strip().rstrip(".")
    causes: Counter[str] = Counter()
    last = ""
    for part in body.split(", "):
        found = _COUNT.match(part)
        if found is not None:
            last = found["cause"]
            causes[last] += int(found["count"])
        elif last:  # a cause with a comma in it
            causes[f"{last}, {part}"] = causes.pop(last)
            last = f"{last}, {part}"
    return int(head["all"]), dict(causes)


def _unplaced(facts: Facts, pods: Sequence[Object], *, placed_pods: int) -> Verdict:
    scheduled = sub(condition(pods[0], "PodScheduled"))
    words = str(scheduled.get("message") or _event_words(facts.events, pods))
    need = Need(group(pods[0]), len(pods), pod_gpus(spec(pods[0])), wanted_gpu(spec(pods[0])))
    numbers = {"unplaced": float(len(pods)), "placed": float(placed_pods)}
    if scheduled.get("reason") == "SchedulingGated":
        text = f"{plural(len(pods), 'pod')} of group {need.group} wait for Kueue to choose their nodes"
        return Verdict(Level.PLACED, text, "wait", (_short(words),), action="wait: this takes seconds", numbers=numbers)
    total, causes = read_scheduler(words)
    if not causes:
        text = f"{plural(len(pods), 'pod')} of group {need.group} have no node yet"
        evidence = (f"scheduler: {_short(words)}",) if words else ()
        return Verdict(Level.PLACED, text, "wait", evidence, action="wait; ask again in a minute", numbers=numbers)
    if need.gpus and f"Insufficient {GPU}" in causes:
        verdict = scattered(need, facts.nodes, level=Level.PLACED, words=f"scheduler: {_counts(total, causes)}")
        return Verdict(
            Level.PLACED, f"admitted, but not placeable: {verdict.text}", verdict.remedy, verdict.evidence,
            action=verdict.action, numbers={**verdict.numbers, **numbers, "nodes": total},
        )  # fmt: skip
    text, remedy, action = _cause(need, causes)
    evidence = (f"{plural(len(pods), 'pod')} without a node, {placed_pods} placed", _counts(total, causes))
    return Verdict(Level.PLACED, text, remedy, evidence, action=action, numbers={**numbers, "nodes": total})


def _cause(need: Need, causes: Mapping[str, int]) -> tuple[str, Remedy, str]:
    """The causes in the order in which they say most: a node short of memory matched everything else."""
    short = [cause.removeprefix("Insufficient ") for cause in causes if cause.startswith("Insufficient ")]
    words = " ".join(causes)
    where = f"for group {need.group}"
    if short:
        action = "ask for less of it, or wait: `gkr nodes` shows what is on the nodes"
        return f"no node has enough {listed(short)} free {where}", "wait", action
    if "Too many pods" in words:
        return f"the nodes {where} have their most pods", "wait", "wait until other pods end"
    if "were unschedulable" in words or "unreachable" in words or "not-ready" in words:
        return f"the nodes {where} are cordoned or not ready", "admin", "an administrator has to bring nodes back"
    if "untolerated taint" in words or "had taints" in words:
        text = f"the nodes {where} have a taint that its pods do not tolerate"
        return text, "admin", "an administrator knows what the taint means"
    if "persistentvolumeclaim" in words.lower() or "volume" in words:
        return f"a volume {where} cannot be had on any node", "change", "check that the volume's claim exists"
    action = "`gkr gpus` and `gkr nodes` show what the cluster has"
    return f"no node matches what {need.group} insists on", "change", action


def _no_pods(facts: Facts) -> Verdict | None:
    warnings = [one for one in facts.events if one.get("type") == "Warning"]
    if facts.raycluster is None and facts.job:
        evidence = tuple(_short(f"{one.get('reason')}: {one.get('message')}") for one in warnings[:2])
        text = "admitted, but KubeRay has not made its Ray cluster yet"
        action = "if it stays so, an administrator has to look at the KubeRay operator"
        return Verdict(Level.PLACED, text, "admin" if evidence else "wait", evidence, action=action)
    evidence = tuple(_short(f"{one.get('reason')}: {one.get('message')}") for one in warnings[:3])
    text = "its pods have not been created"
    action = "the API server's words say what forbids them" if evidence else "wait; ask again in a minute"
    return Verdict(Level.PLACED, text, "admin" if evidence else "wait", evidence, action=action)


def _event_words(events: Sequence[Object], pods: Sequence[Object]) -> str:
    names = {name(pod) for pod in pods}
    for one in events:
        if one.get("reason") == "FailedScheduling" and sub(one, "involvedObject").get("name") in names:
            return str(one.get("message") or "")
    return ""


def _counts(total: int, causes: Mapping[str, int]) -> str:
    ordered = sorted(causes.items(), key=lambda item: item[1])
    return f"of {plural(total, 'node')}: " + ", ".join(f"{count} {cause}" for cause, count in ordered)


def _nearest(need: Need, nodes: Sequence[Node]) -> str:
    """The node that needs least to be freed."""
    able = [node for node in nodes if node.usable and node.gpus >= need.gpus > node.free]
    if not able:
        return ""
    one = max(able, key=lambda node: (node.free, node.name))
    held = listed([f"{who} {count}" for who, count in one.holders.items()])
    return f"nearest: {one.name} has {one.free} of {one.gpus} free; held by {held}" if held else ""


def _who(need: Need, nodes: Sequence[Node]) -> str:
    """Whose end frees enough whole nodes, if one alone does."""
    taken: Counter[str] = Counter()
    for node in _blocked(need, nodes):
        if len(node.holders) == 1:
            taken[next(iter(node.holders))] += 1
    missing = need.pods - sum(node.free >= need.gpus for node in nodes)
    enough = sorted((count, who) for who, count in taken.items() if count >= missing > 0)
    return f": the end of {enough[0][1]} is enough" if enough else ""


def _widest(need: Need, nodes: Sequence[Node]) -> int:
    """The most nodes that could hold a pod within one domain of the level that is a must, were they all free."""
    domains = Counter(
        node.subblock if need.spread == "subblock" else node.block for node in nodes if node.gpus >= need.gpus
    )
    return max(domains.values(), default=0) if need.spread in {"block", "subblock"} else len(nodes)


def _blocked(need: Need, nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.usable and node.gpus >= need.gpus > node.free]


def _short(words: str) -> str:
    return words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]} ..."
