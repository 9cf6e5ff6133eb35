"""Kueue's reason for not admitting a Workload, as data; pure.

Kueue 0.17 says it in a message; from 0.19 on a granular reason may stand beside it (behind a feature gate). Both are
read. A message lists, for every pod set that does not fit, every flavor that was tried: a flavor that can never fit is
no obstacle while another one may become free, but a pod set that can never fit blocks whatever the others do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gkr.cluster.explain_objects import GPU, quantity

Cause = Literal[
    "unused quota", "topology", "preemption", "maximum", "flavor", "queue", "held", "ready", "unknown",
]  # fmt: skip

_GRANULAR: dict[str, Cause] = {
    "WaitingForQuota": "unused quota",
    "TopologyPlacementFailed": "topology",
    "WaitingForPreemptedWorkloads": "preemption",
    "ExceedsMaxQuota": "maximum",
    "NoMatchingFlavor": "flavor",
    "Misconfigured": "queue",
    "Suspended": "queue",
    "Deactivated": "held",
    "WaitingForPodsReady": "ready",
    "Inadmissible": "queue",
}
_POD_SET = re.compile(r"couldn't assign flavors to pod set (?P<name>[^:]+): (?P<rest>.*)", re.DOTALL)
_UNUSED = re.compile(
    r"insufficient unused quota for (?P<resource>\S+) in flavor (?P<flavor>[^\s,]+), (?P<amount>[0-9.]+\w*) more needed"
)
_MAXIMUM = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^\s,]+), previously considered podsets requests "
    r"\((?P<before>[^)]*)\) \+ current podset request \((?P<own>[^)]*)\) > maximum capacity \((?P<most>[^)]*)\)"
)
_TOPOLOGY = re.compile(
    r'topology "(?P<topology>[^"]+)" (?:doesn\'t allow to fit any of (?P<all>\d+)|'
    r"allows to fit only (?P<fit>\d+) out of (?P<of>\d+)) (?P<unit>pod|slice)"
)
_MISMATCH = re.compile(
    r"flavor (?P<flavor>[^\s,]+) (?:doesn't match node affinity|not found)|"
    r"untolerated taint \{[^}]*\} in flavor (?P<tainted>[^\s,]+)|"
    r'Flavor "(?P<flat>[^"]+)" (?:does not support|supports only) TopologyAwareScheduling'
)
_QUEUE = re.compile(
    r"(?:Local|Cluster)Queue \S+ (?:doesn't exist|is inactive|is stopped|not found)|"
    r"namespace doesn't match ClusterQueue selector"
)
_PREEMPTION = re.compile(r"Pending the preemption of (?P<count>\d+) workload")


@dataclass(frozen=True)
class Obstacle:
    """Why a Workload is not admitted."""

    cause: Cause
    words: str
    """Kueue's own."""
    pod_set: str = ""
    resource: str = ""
    flavor: str = ""
    amount: float = 0.0
    """`unused quota`: how much more is needed; `maximum`: how much is asked."""
    most: float = 0.0
    """`maximum`: how much there is in all."""
    fit: int = 0
    """`topology`: pods that fit."""
    pods: int = 0
    """`topology`: pods that have to fit."""


def read_message(reason: str, *, message: str) -> Obstacle:
    """What stands in the way, from a condition's reason and message."""
    granular = _GRANULAR.get(reason)
    preempting = _PREEMPTION.search(message)
    if preempting is not None:
        return Obstacle("preemption", message, amount=float(preempting["count"]))
    clauses = [_pod_set(one["name"], one["rest"], words=message) for one in _clauses(message)]
    if clauses:
        worst = max(clauses, key=_hardness)
        if worst.cause != "unknown":
            return worst
    if _QUEUE.search(message):
        return Obstacle("queue", message)
    return Obstacle(granular or "unknown", message)


def ruled_out(message: str, *, pod_set: str) -> frozenset[str]:
    """Flavors that the message says a pod set can never have."""
    clauses = [found["rest"] for found in _clauses(message) if found["name"] == pod_set]
    matches = [one for clause in clauses for one in _MISMATCH.finditer(clause)]
    return frozenset(one["flavor"] or one["tainted"] or one["flat"] for one in matches)


def _clauses(message: str) -> list[re.Match[str]]:
    return [found for clause in message.split("; ") if (found := _POD_SET.search(clause)) is not None]


def _pod_set(pod_set: str, text: str, *, words: str) -> Obstacle:
    """The easiest of its flavors: one of them is enough. Of one flavor the hardest resource counts."""
    by_flavor: dict[str, Obstacle] = {}
    for one in _obstacles(pod_set, text, words=words):
        known = by_flavor.get(one.flavor)
        by_flavor[one.flavor] = one if known is None else max(known, one, key=_weight)
    return min(by_flavor.values(), key=_hardness, default=Obstacle("unknown", words, pod_set=pod_set))


def _obstacles(pod_set: str, text: str, *, words: str) -> Iterable[Obstacle]:
    for one in _UNUSED.finditer(text):
        amount = quantity(one["amount"])
        yield Obstacle("unused quota", words, pod_set, one["resource"], one["flavor"], amount)
    for one in _MAXIMUM.finditer(text):
        total = quantity(one["before"]) + quantity(one["own"])
        yield Obstacle("maximum", words, pod_set, one["resource"], one["flavor"], total, quantity(one["most"]))
    for one in _TOPOLOGY.finditer(text):
        fit, pods = int(one["fit"] or 0), int(one["of"] or one["all"])
        yield Obstacle("topology", words, pod_set, flavor=f"topology {one['topology']}", fit=fit, pods=pods)
    for one in _MISMATCH.finditer(text):
        yield Obstacle("flavor", words, pod_set, flavor=one["flavor"] or one["tainted"] or one["flat"])


_ORDER: tuple[Cause, ...] = ("unused quota", "topology", "maximum", "flavor")


def _weight(one: Obstacle) -> tuple[int, bool]:
    """Of resources that are equally short, GPUs are what people asked for."""
    return _hardness(one), one.resource == GPU


def _hardness(one: Obstacle) -> int:
    return _ORDER.index(one.cause) if one.cause in _ORDER else -1
