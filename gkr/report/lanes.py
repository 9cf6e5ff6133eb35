"""When a learner trained, waited, applied, or was being restarted: intervals worked out from events. Pure.

Events tell ends and durations; starts follow from them. A learner is taken to train between its first and last sign of
life of an attempt; everything else is laid over that. A synchronisation ends at the learner's `applied` event: before
it lies the time for taking over the weights, before that the wait, before that the snapshot (how much of each: growth
of the learner's own counters around that moment). In decoupled mode training goes on through that wait: it is a
contribution in flight, and only what the learner's counters say is time that it stood still.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gkr.report.record import RunRecord
from spec.events import Applied, AttemptEnded, AttemptStarted, LearnerFinished, Recovery, StepMetrics, SyncMerged

State = Literal["starting", "training", "waiting", "ahead", "applying", "restarting", "flying", "collecting", "merging"]
MOST_FRAGMENT_LANES = 8
"""With more fragments, their merges share one lane."""
_STALLS: tuple[tuple[str, State], ...] = (("barrier", "waiting"), ("max_ahead", "ahead"))


@dataclass(frozen=True)
class Span:
    """A stretch of one lane, in seconds since 1970."""

    state: State
    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A moment on a lane."""

    time: float
    label: str


@dataclass(frozen=True)
class Lane:
    """One learner, or the syncer; later spans are drawn over earlier ones."""

    name: str
    learner: int | None
    """Index of its colour; none for the syncer."""
    spans: list[Span]
    marks: list[Mark]


def lanes(record: RunRecord) -> list[Lane]:
    """One lane per learner, then the syncer's: one for each fragment if there are several, but not many."""
    found = [_learner_lane(record, name=name, index=index) for index, name in enumerate(record.learners)]
    merged = record.of(SyncMerged)
    fragments = sorted({one.fragment for one in merged})
    split = 1 < len(fragments) <= MOST_FRAGMENT_LANES
    for at, which in enumerate([[one] for one in fragments] if split else [fragments]):
        found.append(
            Lane(
                name=f"fragment {which[0]}" if split else "syncer",
                learner=None,
                spans=[one for event in merged if event.fragment in which for one in _round(event)],
                marks=_marks(record, learner="") if at == 0 else [],
            )
        )
    return [one for one in found if one.spans]


def _learner_lane(record: RunRecord, *, name: str, index: int) -> Lane:
    started = [one for one in record.of(AttemptStarted) if one.learner == name]
    steps = [one for one in record.of(StepMetrics) if one.learner == name]
    applied = [one for one in record.of(Applied) if one.learner == name]
    spans: list[Span] = []
    for i, attempt in enumerate(started):
        following = started[i + 1].time if i + 1 < len(started) else None
        spans += _attempt(record, attempt=attempt, following=following, steps=steps)
    if started:
        first = _first_step([one for one in steps if one.time >= started[0].time], default=record.end)
        spans.append(
            Span("starting", record.start, first, "before the first step: dataset, preflight, start of processes")
        )
    spans += _restarts(record, name=name, started=started, steps=steps)
    attempts: dict[int, list[StepMetrics]] = defaultdict(list)
    for one in steps:
        attempts[one.attempt].append(one)
    if record.decoupled:
        spans += [stall for own in attempts.values() for stall in _stalls(own)]
        spans += [_flight(one) for one in applied]
    for one in () if record.decoupled else applied:
        current = [attempt.attempt for attempt in started if attempt.time <= one.time]
        spans += _synchronisation(one, steps=attempts[current[-1]] if current else steps)
    return Lane(
        name=name,
        learner=index,
        spans=[one for one in spans if one.end > one.start],
        marks=_marks(record, learner=name),
    )


def _attempt(
    record: RunRecord, *, attempt: AttemptStarted, following: float | None, steps: Sequence[StepMetrics]
) -> list[Span]:
    ends = [
        one.time for one in record.of(AttemptEnded) if one.learner == attempt.learner and one.attempt == attempt.attempt
    ]
    ends += [
        one.time
        for one in record.of(LearnerFinished)
        if one.learner == attempt.learner and one.attempt == attempt.attempt
    ]
    own = [one for one in steps if one.attempt == attempt.attempt and one.time >= attempt.time]
    if not own:
        return []
    end = min(ends, default=following if following is not None else record.end)
    label = f"attempt {attempt.attempt}: up to step {own[-1].step}"
    return [Span("training", attempt.time, max(end, own[-1].time), label)]


def _first_step(steps: Sequence[StepMetrics], *, default: float) -> float:
    """When the first step began.

    The first event tells of several steps, the distance of the first two tells of how many.
    """
    if not steps:
        return default
    logged = steps[1].step - steps[0].step if len(steps) > 1 else 1
    return steps[0].time - max(0, logged) / max(steps[0].steps_per_second, 1e-3) if logged < 1000 else steps[0].time


def _restarts(
    record: RunRecord, *, name: str, started: Sequence[AttemptStarted], steps: Sequence[StepMetrics]
) -> list[Span]:
    """From the death of an attempt (its end less the time until it was noticed) to the first step of the next."""
    spans: list[Span] = []
    recoveries = [one for one in record.of(Recovery) if one.learner == name and one.first_step_seconds is not None]
    ended = {one.attempt: one for one in record.of(AttemptEnded) if one.learner == name}
    for before, after in itertools.pairwise(started):
        end = ended.get(before.attempt)
        death = end.time if end else after.time
        alive = [one for one in steps if one.attempt == after.attempt and one.time > after.time]
        back = max(after.time, _first_step(alive, default=record.end))
        match = min((one for one in recoveries if one.time >= death - 1), key=lambda one: one.time, default=None)
        if match is not None and match.time <= back + 30:
            death -= match.detected_seconds
            back = death + match.first_step_seconds if match.first_step_seconds is not None else back
        cause = end.cause if end else "unknown cause"
        spans.append(
            Span("restarting", death, back, f"restart after {cause}, attempt {before.attempt} to {after.attempt}")
        )
    return spans


def _synchronisation(applied: Applied, *, steps: Sequence[StepMetrics]) -> list[Span]:
    at = bisect_right(steps, applied.time, key=lambda one: one.time)

    def growth(cause: str) -> float:
        start = steps[at - 1].blocked_seconds.get(cause, 0.0) if at else 0.0
        return max(0.0, steps[at].blocked_seconds.get(cause, 0.0) - start) if at < len(steps) else 0.0

    adopt = applied.time - growth("apply")
    wait = adopt - applied.waited_seconds
    snapshot = wait - growth("snapshot")
    label = f"round {applied.round}"
    return [
        Span("applying", snapshot, wait, f"{label}: snapshot {wait - snapshot:.2f} s"),
        Span("waiting", wait, adopt, f"{label}: waited {applied.waited_seconds:.2f} s ({applied.verdict})"),
        Span("applying", adopt, applied.time, f"{label}: applied in {applied.time - adopt:.2f} s"),
    ]


def _stalls(steps: Sequence[StepMetrics]) -> list[Span]:
    """Growth of a counter between two signs of life, laid before the later one."""
    found: list[Span] = []
    for before, after in itertools.pairwise(steps):
        for cause, state in _STALLS:
            seconds = after.blocked_seconds.get(cause, 0.0) - before.blocked_seconds.get(cause, 0.0)
            if seconds > 0:
                label = f"stood still {seconds:.2f} s before step {after.step} ({cause.replace('_', ' ')})"
                found.append(Span(state, max(before.time, after.time - seconds), after.time, label))
    return found


def _flight(applied: Applied) -> Span:
    what = f"fragment {applied.fragment}, version {applied.round}"
    label = f"{what}: {applied.waited_seconds:.2f} s from snapshot to answer ({applied.verdict})"
    return Span("flying", applied.time - applied.waited_seconds, applied.time, label)


def _round(event: SyncMerged) -> list[Span]:
    sealed = event.time - event.merge_seconds - event.durable_seconds
    who = ", ".join(one.learner for one in event.members if one.arrived_seconds is not None)
    return [
        Span(
            "collecting",
            sealed - event.open_seconds,
            sealed,
            f"round {event.round}: {event.open_seconds:.2f} s from first to last arrival",
        ),
        Span(
            "merging",
            sealed,
            event.time,
            f"round {event.round}: {who} merged and committed in {event.merge_seconds + event.durable_seconds:.2f} s",
        ),
    ]


def _marks(record: RunRecord, *, learner: str) -> list[Mark]:
    """Recoveries of a learner; those without one of the run's learners belong to the syncer."""
    return [
        Mark(time=one.time, label=f"{one.what}: {one.cause}; {one.action}")
        for one in record.of(Recovery)
        if (one.learner == learner if learner else one.learner not in record.learners)
    ]


def visible(spans: Sequence[Span], *, most: int = 1500) -> list[Span]:
    """The longest spans, in their order, so that a long run stays a small page."""
    if len(spans) <= most:
        return list(spans)
    order = sorted(range(len(spans)), key=lambda i: spans[i].start - spans[i].end)
    return [spans[i] for i in sorted(order[:most])]
