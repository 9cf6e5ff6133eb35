"""What a run's events tell of its services; pure.

Drivers write down every few seconds what each replica says of itself, so this is as old as that. A replica that died
since is told by the recovery that followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from spec.events import Event, Recovery, ServiceStats
from spec.plan import LearnerPlan, Plan, ServicePlan

_WHAT = re.compile(r"service (?P<label>\S+-\d+)")


@dataclass(frozen=True)
class ReplicaNow:
    """One replica, or the platform's replicas of a shared service, of which the run's events tell nothing."""

    learner: str
    service: str
    kind: str
    replica: int
    state: str
    """`starting`, `serving`, `restarting`, `given up`, `ended`, `shared`."""
    cause: str
    """Why it restarted last."""
    restarts: int
    seen: float
    """Seconds since 1970 of its last word; 0: none yet."""
    stats: ServiceStats | None


def told_replicas(plan: Plan, events: Iterable[Event], *, over: bool = False) -> list[ReplicaNow]:
    """All replicas of the plan, in its order; once the run is `over`, none of its own is alive."""
    stats: dict[tuple[str, str], ServiceStats] = {}
    deaths: dict[tuple[str, str], list[Recovery]] = {}
    for event in events:
        if isinstance(event, ServiceStats):
            stats[event.learner, f"{event.service}-{event.replica}"] = event
        elif isinstance(event, Recovery) and (found := _WHAT.fullmatch(event.what)):
            deaths.setdefault((event.learner, found["label"]), []).append(event)
    replicas = [
        _shared(learner, service) if service.shared_endpoints else _own(learner, service, index, stats, deaths)
        for learner in plan.learners
        for service in learner.services
        for index in range(1 if service.shared_endpoints else service.replicas)
    ]
    living = {"starting", "serving", "restarting"} if over else set[str]()
    return [replace(one, state="ended") if one.state in living else one for one in replicas]


def _shared(learner: LearnerPlan, service: ServicePlan) -> ReplicaNow:
    where = ", ".join(service.shared_endpoints)
    return ReplicaNow(learner.name, service.name, service.kind, 0, "shared", where, 0, 0.0, None)


def _own(
    learner: LearnerPlan,
    service: ServicePlan,
    index: int,
    stats: Mapping[tuple[str, str], ServiceStats],
    deaths: Mapping[tuple[str, str], list[Recovery]],
) -> ReplicaNow:
    key = (learner.name, f"{service.name}-{index}")
    last, died = stats.get(key), deaths.get(key, [])
    seen = last.time if last is not None else 0.0
    state = "serving" if last is not None else "starting"
    if died and died[-1].time >= seen:
        state = "restarting" if died[-1].action == "restarted" else "given up"
    cause = died[-1].cause if died else ""
    restarts = sum(one.action == "restarted" for one in died)
    return ReplicaNow(learner.name, service.name, service.kind, index, state, cause, restarts, seen, last)
