"""When the learners trained and when they waited for each other."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from gkr.report.charts import Chart, Line, bar_chart, line_chart
from gkr.report.lanes import lanes
from gkr.report.markup import Child, Html, el, empty, section, table
from gkr.report.record import RunRecord
from gkr.report.series import answers, received, staleness, waits
from gkr.report.timeline import timeline
from gkr.report.words import MISSING, count, duration, number, percent, plural, size
from spec.events import CheckpointSaved, StepMetrics, SyncMerged
from spec.summary import Copies, LearnerSummary

Style = Literal["solid", "dashed", "points"]
_MOST_BARS = 40
_CAUSES = ("snapshot", "barrier", "apply", "max_ahead", "data", "encode")


def sync(record: RunRecord) -> Html:
    """Timeline, what synchronising cost, how far learners agreed, and where each learner's time went."""
    found = lanes(record)
    if not found:
        return section("Timeline", empty("No attempt was started."), anchor="timeline")
    drawn = timeline(found, start=record.start, end=record.end)
    charts = el(
        "div",
        _answers(record) if record.decoupled else _waits(record),
        _agreement(record),
        _staleness(record),
        _norms(record),
        _received(record),
        class_="charts",
    )
    lead = _who_took_part(record) if record.decoupled else _who_waited(record)
    return section("Timeline", drawn, charts, _blocked(record), anchor="timeline", lead=lead)


def _who_waited(record: RunRecord) -> str | None:
    """One sentence: who was last how often, who waited how long."""
    last: Counter[str] = Counter()
    shared = 0
    for event in record.of(SyncMerged):
        arrived = [(one.arrived_seconds, one.learner) for one in event.members if one.arrived_seconds is not None]
        if len(arrived) > 1:
            shared += 1
            last[max(arrived)[1]] += 1
    _, waited = waits(record)
    totals = [
        f"{name} waited {duration(sum(one for one in seconds if math.isfinite(one)))}"
        for name, seconds in waited.items()
    ]
    told = f"In all rounds together {', '.join(totals)}." if totals and any(waited.values()) else ""
    if shared:
        slow, times = last.most_common(1)[0]
        return f"{slow} arrived last in {times} of {shared} rounds. {told}"
    return told or None


def _who_took_part(record: RunRecord) -> str | None:
    """One sentence: how often each learner was merged, and how stale it was."""
    merges = len(record.of(SyncMerged))
    said = [
        f"{one.name} took part in {len(one.y)}, on average {sum(one.y) / len(one.y):.1f} versions stale"
        for one in staleness(record)
        if one.y
    ]
    return f"Of {plural(merges, 'merge')}, {'; '.join(said)}." if said else None


def _waits(record: RunRecord) -> Html:
    rounds, waited = waits(record)
    lines = [Line(name, [float(one) for one in rounds], seconds, i) for i, (name, seconds) in enumerate(waited.items())]
    chart = Chart("waits", "Wait for the merged weights", "outer round", lines, y_label="seconds", from_zero=True)
    return bar_chart(chart) if len(rounds) <= _MOST_BARS else line_chart(chart)


def _answers(record: RunRecord) -> Html:
    return line_chart(
        Chart(
            "answers",
            "From snapshot to answer",
            "time since start",
            [Line(one.name, one.x, one.y, i) for i, one in enumerate(answers(record))],
            y_label="seconds",
            from_zero=True,
            seconds=record.end - record.start,
            note="training goes on meanwhile",
        )
    )


def _agreement(record: RunRecord) -> Html:
    """How much in agreement the learners moved in each round."""
    merged = record.of(SyncMerged)
    rounds = [float(one.round) for one in merged]

    def line(name: str, values: list[float | None], color: int | Literal["merged"], style: Style) -> Line:
        return Line(name, rounds, [math.nan if one is None else one for one in values], color, style)

    lines = [
        line("lowest pair of learners", [one.cosine for one in merged], "merged", "points"),
        line("with the outer momentum", [one.momentum_cosine for one in merged], 2, "dashed"),
    ]
    told = [one for one in lines if any(map(math.isfinite, one.y))]
    note = told[0].name if len(told) == 1 else ""  # a legend is drawn for several lines only
    return line_chart(Chart("cosine", "Agreement of displacements (cosine)", "outer round", told, note=note))


def _staleness(record: RunRecord) -> Html:
    """Nothing where no contribution was stale: in barrier mode without late learners."""
    found = staleness(record)
    if not any(any(one.y) for one in found):
        return Html("")
    lines = [Line(one.name, one.x, one.y, i, "points") for i, one in enumerate(found)]
    return line_chart(
        Chart("staleness", "Staleness of contributions", "outer round", lines, y_label="versions", from_zero=True)
    )


def _norms(record: RunRecord) -> Html:
    """How far the learners moved in each round."""
    merged = record.of(SyncMerged)
    norms = Line("norm", [float(one.round) for one in merged], [one.outer_gradient_norm for one in merged], "merged")
    return line_chart(Chart("outer", "Norm of the outer gradient", "outer round", [norms], log=True))


def _received(record: RunRecord) -> Html:
    told = received(record)
    if not any(told.y):
        return Html("")
    chart = Chart(
        "received",
        "Received by the syncer",
        "time since start",
        [Line(told.name, told.x, told.y, "merged")],
        y_label="MB",
        from_zero=True,
        seconds=record.end - record.start,
        note="merged contributions",
    )
    return line_chart(chart)


def _blocked(record: RunRecord) -> Html | None:
    learners = record.summary.learners if record.summary else []
    if not learners:
        return None
    has_copies = any(one.copies for one in learners)
    columns = [_column(record, learner=one, has_copies=has_copies) for one in learners]
    names = [
        "steps",
        "steps per second",
        "final loss",
        *(f"blocked: {one.replace('_', ' ')}" for one in _CAUSES),
        "waits for data",
        "waits for services",
        *(["copies of its data"] if has_copies else []),
        "checkpoints",
    ]
    rows = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
    shown = table(("", *(one.name for one in learners)), rows, numeric=range(1, len(learners) + 1), class_="narrow")
    note = (
        "How long the training loop stood still, by cause, and as a share of the run's wall time; which share of its"
        " time a rank waited for data and services behind the first round; checkpoints with the median time each held"
        " it."
    )
    if has_copies:
        note += (
            " Copies of its data: how often one was there, what was fetched and what was read without one, on the node"
            " of rank 0 by all its processes."
        )
    return el("div", el("h3", "Where the time went"), el("p", note, class_="lead"), shown)


def _column(record: RunRecord, *, learner: LearnerSummary, has_copies: bool) -> list[Child]:
    blocked = learner.blocked_seconds
    told = {
        "snapshot": blocked.snapshot,
        "barrier": blocked.barrier,
        "apply": blocked.apply,
        "max_ahead": blocked.max_ahead,
    }
    told |= {cause: _last_blocked(record, learner=learner.name, cause=cause) for cause in ("data", "encode")}
    saved = sorted(one.blocked_seconds for one in record.of(CheckpointSaved) if one.learner == learner.name)
    wall = record.wall_seconds or math.inf
    causes = [
        [duration(told[one]), " ", el("small", percent(told[one] / wall))] if told[one] > 0 else "0 s"
        for one in _CAUSES
    ]
    checkpoints = [count(len(saved)), " ", el("small", f"{duration(saved[len(saved) // 2])} each")] if saved else "0"
    waits = [percent(learner.waited.data), percent(learner.waited.services)]
    first = [count(learner.steps), number(learner.steps_per_second), number(learner.final_loss)]
    copies = [_copies(learner.copies)] if has_copies else []
    return [*first, *causes, *waits, *copies, checkpoints]


def _copies(found: Copies | None) -> list[Child]:
    if found is None:
        return [MISSING]
    told = f"{size(found.fetched_bytes)} fetched, {size(found.range_bytes)} by range"
    if found.damaged:
        told += f", {count(found.damaged)} damaged"
    return [count(found.hits), " ", el("small", told)]


def _last_blocked(record: RunRecord, *, learner: str, cause: str) -> float:
    """Sum over attempts of the last counter of each."""
    last: dict[int, float] = {}
    for one in record.of(StepMetrics):
        if one.learner == learner:
            last[one.attempt] = one.blocked_seconds.get(cause, 0.0)
    return sum(last.values())
