"""Who holds the quota that an experiment waits for, and what would free it; pure."""

from __future__ import annotations

from collections.abc import Sequence

from gkr.cluster.explain_facts import Facts
from gkr.cluster.explain_objects import GPU, listed, spec, sub
from gkr.cluster.explain_quota import Obstacle
from gkr.cluster.queues import Claim, admission, claim
from gkr.watch.text import short_duration


def holders(facts: Facts, *, flavor: str, resource: str) -> list[tuple[Claim, float]]:
    """Admitted Workloads of the same ClusterQueue with what they hold of it, most first."""
    found = [claim(one) for one in facts.workloads if admission(one) is not None]
    held = [(one, one.by_flavor.get((flavor, resource), 0.0)) for one in found]
    return sorted((pair for pair in held if pair[1] > 0), key=lambda pair: (-pair[1], pair[0].created))


def holders_line(held: Sequence[tuple[Claim, float]], *, resource: str, now: float) -> str:
    """`held by big (run), 512 GPUs for 2h04m, ...`; empty if nobody holds any."""
    if not held:
        return ""
    parts = [f"{one.who} {amount_of(amount, resource)}{_since(one, now=now)}" for one, amount in held]
    return f"held by {listed(parts)}"


def what_frees(facts: Facts, obstacle: Obstacle) -> str:
    """The fewest holders whose end is enough, and whether a higher priority would be."""
    held = holders(facts, flavor=obstacle.flavor, resource=obstacle.resource)
    enough = smallest_enough(held, needed=obstacle.amount)
    if not enough:
        return "wait; who holds it is not in this queue (a shared cohort): `gkr queues` shows more"
    names = " and ".join(one.who for one in enough)
    ends = "end" if len(enough) > 1 else "ends"
    text = f"wait until {names} {ends}"
    higher = _priority_that_preempts(facts, held=held, needed=obstacle.amount)
    return text + (f", or launch it with `priority: {higher}`, which makes room at once" if higher else "")


def smallest_enough(held: Sequence[tuple[Claim, float]], *, needed: float) -> list[Claim]:
    """As few holders as possible; of one holder that is enough alone, the smallest. Empty if all are not enough."""
    alone = [pair for pair in held if pair[1] >= needed]
    if alone:
        return [min(alone, key=lambda pair: pair[1])[0]]
    chosen: list[Claim] = []
    total = 0.0
    for one, amount in sorted(held, key=lambda pair: -pair[1]):
        chosen.append(one)
        total += amount
        if total >= needed:
            return chosen
    return []


def _priority_that_preempts(facts: Facts, *, held: Sequence[tuple[Claim, float]], needed: float) -> str:
    """The lowest priority class with which Kueue would stop enough holders; empty if there is none.

    Only in its own ClusterQueue, and only where that queue preempts at all.
    """
    policy = sub(spec(facts.cluster_queue or {}), "preemption").get("withinClusterQueue", "Never")
    own = int(spec(facts.workload or {}).get("priority") or 0)
    if policy == "Never":
        return ""
    for name, value in sorted(facts.priorities.items(), key=lambda item: item[1]):
        if value > own and sum(amount for one, amount in held if one.priority < value) >= needed:
            return name
    return ""


def _since(one: Claim, *, now: float) -> str:
    return f" for {short_duration(now - one.admitted)}" if one.admitted else ""


def amount_of(amount: float, resource: str) -> str:
    """`16 GPUs`, `5600Gi memory`, `1.5 cpu`."""
    if resource in {"memory", "ephemeral-storage"}:
        return f"{amount / 2**30:.4g}Gi {resource}" if amount < 2**40 else f"{amount / 2**30:.0f}Gi {resource}"
    return f"{amount:g} {'GPUs' if resource == GPU else resource}"
