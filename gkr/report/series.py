"""Curves of a run, worked out from its events. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gkr.report.record import RunRecord
from spec.events import Applied, ServiceStats, StepMetrics, SyncMerged, Validation


@dataclass(frozen=True)
class Curve:
    """x and y of one name; NaN breaks the line."""

    name: str
    x: list[float]
    y: list[float]


def by_step(record: RunRecord, *, learner: str, value: Callable[[StepMetrics], float | None]) -> Curve:
    """A value of a learner over its inner steps; an attempt that repeats steps starts a new piece of the line."""
    return _pieces(record, learner=learner, value=value, x=lambda one: float(one.step))


def by_time(record: RunRecord, *, learner: str, value: Callable[[StepMetrics], float | None]) -> Curve:
    """The same over seconds since the start of the run."""
    return _pieces(record, learner=learner, value=value, x=lambda one: one.time - record.start)


def _pieces(
    record: RunRecord, *, learner: str, value: Callable[[StepMetrics], float | None], x: Callable[[StepMetrics], float]
) -> Curve:
    xs: list[float] = []
    ys: list[float] = []
    attempt: int | None = None
    for one in record.of(StepMetrics):
        if one.learner != learner:
            continue
        if attempt is not None and one.attempt != attempt:
            xs.append(x(one))
            ys.append(math.nan)
        attempt = one.attempt
        y = value(one)
        xs.append(x(one))
        ys.append(math.nan if y is None else y)
    return Curve(name=learner, x=xs, y=ys)


class _Clock:
    """The inner step that a learner had reached at a time, by its own signs of life."""

    def __init__(self, record: RunRecord) -> None:
        self._told: dict[str, tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
        for one in record.of(StepMetrics):
            times, steps = self._told[one.learner]
            times.append(one.time)
            steps.append(one.step)

    def step(self, learner: str, *, time: float) -> float | None:
        """None before the first sign."""
        times, steps = self._told[learner]
        before = bisect_right(times, time)
        return float(steps[before - 1]) if before else None


def round_steps(record: RunRecord) -> dict[int, float]:
    """The inner step at which each round of shared weights (of the first fragment) was taken up, by the first learner
    that says so.
    """
    clock = _Clock(record)
    found: dict[int, float] = {}
    for one in record.of(Applied):
        step = clock.step(one.learner, time=one.time)
        if step is not None and one.fragment == 0:
            found.setdefault(one.round, step)
    return found


def validation(record: RunRecord) -> Curve:
    """Loss of the merged model over inner steps."""
    clock = _Clock(record)
    said: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in record.of(Validation):
        step = clock.step(one.learner, time=one.time)
        if step is not None:
            said[one.round].append((step, one.loss))
    placed = sorted((told[0][0], sum(loss for _, loss in told) / len(told)) for told in said.values())
    return Curve(name="merged model, validation", x=[step for step, _ in placed], y=[loss for _, loss in placed])


def answers(record: RunRecord) -> list[Curve]:
    """Seconds from snapshot to answer of every contribution, by learner, over seconds since the start."""
    found = {name: Curve(name=name, x=[], y=[]) for name in record.learners}
    for one in record.of(Applied):
        curve = found.setdefault(one.learner, Curve(name=one.learner, x=[], y=[]))
        curve.x.append(one.time - record.start)
        curve.y.append(one.waited_seconds)
    return list(found.values())


def staleness(record: RunRecord) -> list[Curve]:
    """Versions between base and merge of every merged contribution, by learner, over rounds."""
    found = {name: Curve(name=name, x=[], y=[]) for name in record.learners}
    for event in record.of(SyncMerged):
        for one in event.members:
            if one.arrived_seconds is not None:
                curve = found.setdefault(one.learner, Curve(name=one.learner, x=[], y=[]))
                curve.x.append(float(event.round))
                curve.y.append(float(one.staleness))
    return list(found.values())


def received(record: RunRecord) -> Curve:
    """Megabytes (10^6) that the syncer has received in merged contributions, over seconds since the start."""
    total, curve = 0.0, Curve(name="received", x=[0.0], y=[0.0])
    for one in record.of(SyncMerged):
        curve.x.extend([one.time - record.start] * 2)
        curve.y.extend([total, total + one.bytes_in / 1e6])
        total = curve.y[-1]
    return curve


def waits(record: RunRecord) -> tuple[list[int], dict[str, list[float]]]:
    """Rounds, and the seconds each learner waited in each (NaN where it did not take part)."""
    said: dict[tuple[str, int], float] = {}
    for one in record.of(Applied):
        said[one.learner, one.round] = said.get((one.learner, one.round), 0.0) + one.waited_seconds
    rounds = sorted({number for _, number in said})
    return rounds, {name: [said.get((name, number), math.nan) for number in rounds] for name in record.learners}


@dataclass(frozen=True)
class ServiceCurves:
    """What one service did over time, over its replicas: the worst latency and the sum of the queues."""

    name: str
    p50: dict[str, Curve]
    """By learner."""
    p99: dict[str, Curve]
    queued: dict[str, Curve]
    """By `<learner>/rank-<n>`, as the replica names its clients; by learner where it names none."""


def services(record: RunRecord) -> list[ServiceCurves]:
    """All services in order of first sign."""
    groups: dict[str, dict[str, list[ServiceStats]]] = defaultdict(lambda: defaultdict(list))
    for one in record.of(ServiceStats):
        groups[one.service][one.learner].append(one)
    found: list[ServiceCurves] = []
    for name, by_learner in groups.items():
        p50 = {
            who: _latest(record, stats, name=who, value=lambda one: {"": one.p50_ms}, merge=max)[""]
            for who, stats in by_learner.items()
        }
        p99 = {
            who: _latest(record, stats, name=who, value=lambda one: {"": one.p99_ms}, merge=max)[""]
            for who, stats in by_learner.items()
        }
        queued: dict[str, Curve] = {}
        for who, stats in by_learner.items():
            told = any(one.queued_by_rank for one in stats)
            curves = _latest(
                record, stats, name=who, value=(lambda one: dict(one.queued_by_rank)) if told else _queued, merge=sum
            )
            queued |= {key or who: curve for key, curve in curves.items()}
        found.append(ServiceCurves(name=name, p50=p50, p99=p99, queued=queued))
    return found


def _queued(one: ServiceStats) -> dict[str, int]:
    return {"": one.queued}


def _latest(
    record: RunRecord,
    stats: Iterable[ServiceStats],
    *,
    name: str,
    value: Callable[[ServiceStats], dict[str, int] | dict[str, float]],
    merge: Callable[[Iterable[float]], float],
) -> dict[str, Curve]:
    """At each sign of any replica, the merged last word of all replicas."""
    told = list(stats)
    keys = list(dict.fromkeys(key for one in told for key in value(one)))
    now: dict[int, ServiceStats] = {}
    curves = {key: Curve(name=key or name, x=[], y=[]) for key in keys}
    for one in told:
        now[one.replica] = one
        for key, curve in curves.items():
            curve.x.append(one.time - record.start)
            curve.y.append(merge([float(value(last).get(key, 0)) for last in now.values()]))
    return curves


def samples_per_second(record: RunRecord) -> Curve:
    """All learners together.

    Samples whose steps committed, per stretch of wall time (several seconds: events come every few steps).
    """
    seconds = record.end - record.start
    buckets = max(6, min(60, int(seconds / 6)))
    if seconds <= 0:
        return Curve(name="all learners", x=[], y=[])
    width = seconds / buckets
    gained = [0.0] * buckets
    last: dict[tuple[str, int], int] = {}
    for one in record.of(StepMetrics):
        key = (one.learner, one.attempt)
        if key in last:
            gained[min(buckets - 1, int((one.time - record.start) / width))] += max(0, one.position - last[key])
        last[key] = one.position
    return Curve(
        name="all learners", x=[(i + 0.5) * width for i in range(buckets)], y=[value / width for value in gained]
    )
