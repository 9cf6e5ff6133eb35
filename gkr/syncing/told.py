"""The state of the sync as a run's events tell it; pure.

For runs that have ended, and for syncers that cannot be asked. Events know less than the syncer: no leases, no steps in
flight, and no generation of a learner that has not been merged yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spec.events import (
    Applied,
    Event,
    LearnerFinished,
    Note,
    Restored,
    StepMetrics,
    SyncLedger,
    SyncMerged,
    SyncWaiting,
)
from spec.plan import Plan
from spec.sync_status import FragmentStatus, MemberStatus, SyncStatus

_CLOSED: dict[str, Any] = {"stage": "", "arrived": [], "waiting_for": [], "why": "", "until": None}


@dataclass
class _Told:
    """What has been told so far, as fields of the documents."""

    whole: dict[str, Any]
    members: dict[str, dict[str, Any]]
    fragments: dict[int, dict[str, Any]]
    time: float = 0.0


def told_status(plan: Plan, events: Iterable[Event]) -> tuple[SyncStatus, float]:
    """The state after the events, and the time of the last one that was about it (0: none was)."""
    syncer = plan.syncer
    assert syncer is not None
    told = _Told(
        {
            "run": plan.run,
            "mode": syncer.config.mode,
            "state": "SEEDING",
            "version": -1,
            "target_samples": syncer.target_samples,
            "seed_from": plan.home.name,
        },
        {one.name: {"learner": one.name} for one in plan.learners},
        {one: {"fragment": one, "version": -1, "round": 0} for one in range(syncer.config.fragments)},
    )
    for event in events:
        if _tell(told, event):
            told.time = max(told.time, event.time)
    if told.whole.get("final"):
        for one in told.fragments.values():
            one.update(_CLOSED)
    status = SyncStatus(
        members=[MemberStatus(**one) for _, one in sorted(told.members.items())],
        fragments=[FragmentStatus(**one) for _, one in sorted(told.fragments.items())],
        **told.whole,
    )
    return status, told.time


def closed(status: SyncStatus) -> SyncStatus:
    """The same once nothing of the run is alive: no round is open, and nobody trains."""
    if status.final:
        return status
    fragments = [one.model_copy(update=_CLOSED) for one in status.fragments]
    members = [one if one.state == "finished" else one.model_copy(update={"state": "ended"}) for one in status.members]
    now = {"state": "ENDED", "seed_from": "", "fragments": fragments, "members": members}
    return status.model_copy(update=now)


def _tell(told: _Told, event: Event) -> bool:
    match event:
        case SyncWaiting():
            _waiting(told, event)
        case SyncMerged():
            _merged(told, event)
        case SyncLedger():
            for name, merged in event.merged.items():
                discarded = event.discarded.get(name, 0)
                _member(told, name).update(merged_samples=merged, discarded_samples=discarded)
            if event.final:
                told.whole.update(state="FINAL", final=True, model_sha256=event.model_sha256 or "")
            if event.round >= 0:
                told.whole.update(version=max(told.whole["version"], event.round), seed_from="")
                _serving(told)
        case StepMetrics():
            steps = event.steps_per_second
            _member(told, event.learner).update(
                state="training",
                step=event.step,
                step_seconds=1 / steps if steps > 0 else 0.0,
                blocked_seconds=event.blocked_seconds,
            )
        case Restored():
            _member(told, event.learner).update(state=f"restored ({event.mode})", step=event.step)
        case Applied():
            _member(told, event.learner)["base_versions"] = [event.round]
        case LearnerFinished():
            _member(told, event.learner).update(state="finished", step=event.step)
        case Note(source="syncer", level="error"):
            told.whole["alarm"] = event.text
        case _:
            return False
    return True


def _waiting(told: _Told, event: SyncWaiting) -> None:
    names = ", ".join(event.waiting_for)
    _serving(told)
    _fragment(told, event.fragment).update(
        round=event.round,
        stage="OPEN",
        arrived=event.arrived,
        waiting_for=event.waiting_for,
        why=f"waits for {names}" if names else "",
        until=event.deadline,
    )


def _merged(told: _Told, event: SyncMerged) -> None:
    version = event.round if event.fragment_version < 0 else event.fragment_version
    fragment = _fragment(told, event.fragment)
    fragment.update(_CLOSED, version=version, round=version + 1)
    fragment.update(
        bytes_in=event.bytes_in,
        outer_gradient_norm=event.outer_gradient_norm,
        cosine=event.cosine,
        merge_seconds=event.merge_seconds,
        durable_seconds=event.durable_seconds,
    )
    told.whole.update(
        state="FINAL" if event.final else "SERVING",
        epoch=event.epoch,
        version=event.round,
        samples_total=event.samples_total,
        theta_sha256=event.theta_sha256,
        final=event.final,
        seed_from="",
        alarm="",
    )
    if event.model_sha256:
        told.whole["model_sha256"] = event.model_sha256
    for one in event.members:
        member = _member(told, one.learner)
        member["generation"] = one.generation
        if one.arrived_seconds is not None:
            _put(member, "staleness", at=event.fragment, value=one.staleness)


def _serving(told: _Told) -> None:
    if told.whole["state"] == "SEEDING":
        told.whole.update(state="SERVING", seed_from="")


def _put(member: dict[str, Any], name: str, *, at: int, value: int) -> None:
    values: list[int] = member.setdefault(name, [])
    values.extend([0] * (at + 1 - len(values)))
    values[at] = value


def _member(told: _Told, name: str) -> dict[str, Any]:
    return told.members.setdefault(name, {"learner": name})


def _fragment(told: _Told, number: int) -> dict[str, Any]:
    return told.fragments.setdefault(number, {"fragment": number, "version": -1, "round": 0})
