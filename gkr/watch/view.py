"""What a person who watches wants to know, folded from events by a pure function.

`fold(view, event)` keeps the newest of everything and short histories; nothing grows with the length of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gkr.runs import FINAL
from spec.events import (
    Applied,
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Event,
    LearnerFinished,
    Note,
    Preflight,
    Prepared,
    Recovery,
    Restored,
    RunStatus,
    Score,
    ServiceStats,
    StepMetrics,
    SyncLedger,
    SyncMerged,
    SyncWaiting,
    Validation,
)
from spec.plan import Plan

_HISTORY = 120
_RECENT = 5

T = TypeVar("T")


@dataclass(frozen=True)
class LearnerView:
    """One learner now."""

    name: str
    cluster: str = ""
    world_size: int = 0
    state: str = "waiting"
    attempt: int = 0
    step: int = 0
    position: int = 0
    round: int = 0
    losses: tuple[float, ...] = ()
    validations: tuple[float, ...] = ()
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    mfu: float | None = None
    loader_queue: int = 0
    blocked_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    checkpoint_step: int | None = None
    preflight_failed: int = 0

    @property
    def loss(self) -> float | None:
        return self.losses[-1] if self.losses else None


@dataclass(frozen=True)
class SyncView:
    """The outer rounds now. Of several fragments, the round that changed last."""

    version: int = 0
    fragment: int = 0
    samples_total: int = 0
    arrived: tuple[str, ...] = ()
    waiting_for: tuple[str, ...] = ()
    deadline: float | None = None
    open_seconds: float = 0.0
    cosine: float | None = None
    final: bool = False


@dataclass(frozen=True)
class View:
    """One run now. `elapsed` and `eta_seconds` need the caller's clock and are methods of the printing side."""

    experiment: str
    run: str
    target_samples: int
    learners: Mapping[str, LearnerView]
    sync: SyncView | None = None
    services: Mapping[str, ServiceStats] = field(default_factory=dict[str, ServiceStats])
    """By learner/service-replica."""
    status: str = "starting"
    reason: str = ""
    exit_code: int | None = None
    started: float | None = None
    updated: float = 0.0
    checkpoints: int = 0
    recoveries: tuple[Recovery, ...] = ()
    num_recoveries: int = 0
    notes: tuple[Note, ...] = ()
    score: Score | None = None

    @property
    def samples(self) -> int:
        """Samples consumed towards the target by all learners, never shown beyond it."""
        consumed = sum(learner.position for learner in self.learners.values())
        merged = self.sync.samples_total if self.sync else 0
        return min(self.target_samples, max(consumed, merged)) if self.target_samples else consumed

    @property
    def eta_seconds(self) -> float | None:
        """Time to the target at the present rate; none while there is no rate."""
        rate = sum(learner.samples_per_second for learner in self.learners.values() if learner.state == "training")
        if rate <= 0 or not self.target_samples:
            return None
        return max(0.0, (self.target_samples - self.samples) / rate)


def initial_view(plan: Plan) -> View:
    """Before the first event."""
    target = plan.syncer.target_samples if plan.syncer else plan.train.samples if plan.train else 0
    learners = {
        one.name: LearnerView(one.name, cluster=one.cluster, world_size=one.world_size) for one in plan.learners
    }
    return View(plan.experiment, plan.run, target, learners, sync=SyncView() if plan.syncer else None)


def fold(view: View, event: Event) -> View:
    """The view after one more event."""
    view = replace(view, updated=max(view.updated, event.time), started=view.started or event.time)
    match event:
        case RunStatus():
            view = replace(view, status=event.status, reason=event.reason, exit_code=event.exit_code)
            return ended(view) if event.status in FINAL else view
        case SyncWaiting() | SyncMerged() | SyncLedger():
            return replace(view, sync=_fold_sync(view.sync or SyncView(), event))
        case ServiceStats():
            key = f"{event.learner}/{event.service}-{event.replica}"
            return replace(view, services={**view.services, key: event})
        case Score():
            return replace(view, score=event)
        case Recovery():
            kept = _push(view.recoveries, event, limit=_RECENT)
            return replace(view, recoveries=kept, num_recoveries=view.num_recoveries + 1)
        case Note():
            return replace(view, notes=_push(view.notes, event, limit=_RECENT))
        case _:
            return _fold_learner_event(view, event)


def ended(view: View) -> View:
    """Nothing of the run is alive: nobody trains, and nobody is waited for."""
    learners = {
        name: one
        if one.state == "finished"
        else replace(one, state="ended", steps_per_second=0.0, samples_per_second=0.0)
        for name, one in view.learners.items()
    }
    sync = replace(view.sync, arrived=(), waiting_for=(), deadline=None) if view.sync else None
    return replace(view, learners=learners, sync=sync)


def _fold_learner_event(view: View, event: Event) -> View:
    learner = view.learners.get(getattr(event, "learner", ""))
    if learner is None:
        return view
    if isinstance(event, CheckpointSaved):
        view = replace(view, checkpoints=view.checkpoints + 1)
    return replace(view, learners={**view.learners, learner.name: _fold_learner(learner, event)})


def _fold_learner(learner: LearnerView, event: Event) -> LearnerView:
    match event:
        case Prepared():
            return replace(learner, state="data ready")
        case Preflight():
            failed = sum(check.verdict == "FAIL" for check in event.checks)
            return replace(learner, state="preflight", preflight_failed=learner.preflight_failed + failed)
        case AttemptStarted():
            return replace(learner, state="starting", attempt=event.attempt, world_size=event.world_size)
        case AttemptEnded():
            state = "finished" if event.cause == "finished" else f"recovering from {event.cause}"
            return replace(learner, state=state, steps_per_second=0.0, samples_per_second=0.0)
        case Restored():
            return replace(learner, state=f"restored ({event.mode})", step=event.step, position=event.position)
        case StepMetrics():
            return _fold_step(learner, event)
        case Validation():
            return replace(learner, validations=_push(learner.validations, event.loss, limit=_HISTORY))
        case Applied():
            # The version of one fragment is at most that of all together, which steps tell.
            return replace(learner, round=max(learner.round, event.round))
        case CheckpointSaved():
            return replace(learner, checkpoint_step=event.step)
        case LearnerFinished():
            return replace(learner, state="finished", step=event.step, round=event.round)
        case _:
            return learner


def _fold_step(learner: LearnerView, event: StepMetrics) -> LearnerView:
    return replace(
        learner,
        state="training",
        attempt=event.attempt,
        step=event.step,
        position=event.position,
        round=max(learner.round, event.round),
        losses=_push(learner.losses, event.loss, limit=_HISTORY),
        steps_per_second=event.steps_per_second,
        samples_per_second=event.samples_per_second,
        mfu=event.mfu,
        loader_queue=event.loader_queue,
        blocked_seconds=event.blocked_seconds,
    )


def _fold_sync(sync: SyncView, event: SyncWaiting | SyncMerged | SyncLedger) -> SyncView:
    if isinstance(event, SyncLedger):
        return replace(sync, final=event.final)
    if isinstance(event, SyncWaiting):
        return replace(
            sync,
            fragment=event.fragment,
            arrived=tuple(event.arrived),
            waiting_for=tuple(event.waiting_for),
            deadline=event.deadline,
        )
    if event.fragment == sync.fragment:
        sync = replace(sync, arrived=(), waiting_for=(), deadline=None)
    return replace(
        sync,
        version=event.round,
        samples_total=event.samples_total,
        open_seconds=event.open_seconds,
        cosine=event.cosine,
    )


def _push(items: tuple[T, ...], item: T, *, limit: int) -> tuple[T, ...]:
    return (*items, item)[-limit:]
