"""Events and views of a watched run, with invented numbers."""

from __future__ import annotations

from functools import reduce

from gkr.watch.view import View, fold, initial_view
from spec.events import Event, StepMetrics, SyncMember, SyncMerged
from tests.builders import local_runs


def step(learner: str, step: int, *, time: float = 0.0, loss: float = 1.0) -> StepMetrics:
    """A step event of a learner."""
    return StepMetrics(
        time=time,
        source=f"rank/{learner}/0",
        learner=learner,
        attempt=1,
        step=step,
        position=step * 64,
        round=0,
        loss=loss,
        gradient_norm=1.0,
        learning_rate=0.1,
        steps_per_second=8.0,
        samples_per_second=512.0,
        loader_queue=4,
    )


def merged(round_: int, *, samples_total: int, final: bool = False) -> SyncMerged:
    """A merged round of both learners."""
    members = [
        SyncMember(learner=name, generation=1, state="active", arrived_seconds=1.0, samples=1280)
        for name in ("east", "west")
    ]
    return SyncMerged(
        time=9.0,
        source="syncer",
        round=round_,
        epoch=1,
        members=members,
        open_seconds=1.5,
        merge_seconds=0.1,
        durable_seconds=0.1,
        outer_gradient_norm=1.0,
        samples_total=samples_total,
        theta_sha256="0" * 64,
        final=final,
    )


def seen(*events: Event) -> View:
    """The view after these events."""
    return reduce(fold, events, initial_view(local_runs.plan()))
