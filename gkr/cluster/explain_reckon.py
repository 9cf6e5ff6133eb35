"""Our own sum of quota and requests, for when Kueue's message leaves the obstacle out; pure.

Kueue tries the flavors of a queue in turn, one attempt after the other, and its message names those of the last attempt
only: "flavor a3-mega doesn't match node affinity" can be all that is left of "a3-ultra is full". What it asks, what the
queue has and what is used are all known, so the sum says which it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gkr.cluster.capacity import ACCELERATOR_LABELS, gpu_token
from gkr.cluster.explain_facts import Facts
from gkr.cluster.explain_objects import GPU, Object, name, pod_gpus, quantity, spec, sub, subs
from gkr.cluster.explain_place import wanted_gpu
from gkr.cluster.explain_quota import Obstacle, ruled_out
from gkr.cluster.queues import Quota, quotas


def reckon(facts: Facts, workload: Object, said: Obstacle) -> Obstacle:
    """The obstacle as the numbers have it: Kueue's own if they cannot tell."""
    rows = quotas(facts.cluster_queue or {})
    kinds = {name(one): flavor_gpu(one) for one in facts.flavors}
    if not rows or not facts.flavors:
        return said
    taken: dict[tuple[str, str], float] = defaultdict(float)
    found: list[Obstacle] = []
    for pod_set in subs(spec(workload), "podSets"):
        never = ruled_out(said.words, pod_set=str(pod_set.get("name")))
        flavors = [one for one in matching_flavors(pod_set, kinds) if one not in never]
        tries = [_try(pod_set, flavor, rows, taken, said) for flavor in flavors]
        if not tries:
            found.append(replace(said, cause="flavor", pod_set=str(pod_set.get("name"))))
        elif all(one is not None for one in tries):
            found.append(min((one for one in tries if one is not None), key=lambda one: one.cause == "maximum"))
        else:
            for resource, amount in requests(pod_set).items():
                taken[flavors[tries.index(None)], resource] += amount
    for cause in ("flavor", "maximum", "unused quota"):
        for one in found:
            if one.cause == cause:
                return one
    gpu_set = next((one for one in subs(spec(workload), "podSets") if requests(one).get(GPU)), None)
    return replace(said, cause="topology", pod_set=str(gpu_set.get("name"))) if gpu_set is not None else said


def flavor_gpu(flavor: Object) -> str:
    """GPU type of a ResourceFlavor's machines; empty for those without."""
    own: Mapping[str, str] = sub(spec(flavor), "nodeLabels")
    return next((gpu_token(own[key]) for key in ACCELERATOR_LABELS if key in own), "")


def matching_flavors(pod_set: Object, kinds: Mapping[str, str]) -> list[str]:
    """Flavors whose machines the pods would accept."""
    pod_spec: Object = sub(pod_set, "template", "spec")
    wanted, gpus = wanted_gpu(pod_spec), pod_gpus(pod_spec)
    return [flavor for flavor, gpu in kinds.items() if (gpu == wanted if wanted else bool(gpu) == bool(gpus))]


def requests(pod_set: Object) -> dict[str, float]:
    """What all pods of a pod set ask for together."""
    pod_spec: Object = sub(pod_set, "template", "spec")
    count = int(pod_set.get("count", 1))
    total: dict[str, float] = {GPU: float(count * pod_gpus(pod_spec))}
    for container in subs(pod_spec, "containers"):
        resources = sub(container, "resources")
        asked = {**sub(resources, "limits"), **sub(resources, "requests")}
        for resource in ("cpu", "memory"):
            total[resource] = total.get(resource, 0.0) + count * quantity(asked.get(resource))
    return {resource: amount for resource, amount in total.items() if amount > 0}


def _try(
    pod_set: Object, flavor: str, rows: Iterable[Quota], taken: Mapping[tuple[str, str], float], said: Obstacle
) -> Obstacle | None:
    """Why a pod set does not fit a flavor; none if it does."""
    own = {row.resource: row for row in rows if row.flavor == flavor}
    short: Obstacle | None = None
    for resource, amount in requests(pod_set).items():
        row = own.get(resource)
        if row is None:
            continue
        total = amount + taken.get((flavor, resource), 0.0)
        base = replace(said, pod_set=str(pod_set.get("name")), resource=resource, flavor=flavor)
        if total > row.nominal:
            return replace(base, cause="maximum", amount=total, most=row.nominal)
        if total > row.free and (short is None or resource == GPU):
            short = replace(base, cause="unused quota", amount=total - row.free)
    return short
