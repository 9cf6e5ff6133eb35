"""Losses and throughput."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gkr.report.charts import Chart, Line, line_chart
from gkr.report.markup import Html, el, empty, section
from gkr.report.record import RunRecord
from gkr.report.series import Curve, by_step, by_time, round_steps, samples_per_second, validation
from spec.events import StepMetrics


def losses(record: RunRecord) -> Html:
    """Loss of every learner, validation loss of the merged model, learning rate and gradient norm."""
    lines = [_line(one, color=i) for i, one in enumerate(_all(record, value=lambda one: one.loss))]
    merged = validation(record)
    if merged.x:
        lines.append(Line(merged.name, merged.x, merged.y, "merged", "points"))
    seconds = record.end - record.start
    marks = sorted(set(round_steps(record).values()))
    charts = (
        line_chart(
            Chart(
                "loss",
                "Loss",
                "inner step",
                lines,
                log=True,
                marks=marks if len(marks) <= 60 else (),
                note="dotted lines: outer rounds",
            )
        ),
        _steps(
            record, key="norm", title="Gradient norm before clipping", value=lambda one: one.gradient_norm, log=True
        ),
        _steps(record, key="rate", title="Learning rate", value=lambda one: one.learning_rate),
    )
    lead = (
        "Each learner trains on its own data; the merged model is validated on held-out samples right after a"
        " learner took it up."
    )
    if not any(charts):
        return section("Loss", empty("No step was logged."), anchor="loss")
    wide = line_chart(
        Chart("loss-time", "Loss over time", "time since start", _over_time(record), log=True, seconds=seconds)
    )
    return section("Loss", el("div", charts[0], wide, charts[1], charts[2], class_="charts"), anchor="loss", lead=lead)


def throughput(record: RunRecord) -> Html:
    """Steps and samples per second over time; model FLOPs utilisation and loader queue where told."""
    seconds = record.end - record.start
    rates = [
        _line(one, color=i, style=_style(i))
        for i, one in enumerate(_time(record, value=lambda one: one.steps_per_second))
    ]
    samples = [
        _line(one, color=i, style=_style(i))
        for i, one in enumerate(_time(record, value=lambda one: one.samples_per_second))
    ]
    both = samples_per_second(record)
    if len(record.learners) > 1 and any(both.y):
        samples.append(Line("all learners, waits included", both.x, both.y, "merged", faint=True))
    queue = [
        _line(one, color=i, style=_style(i))
        for i, one in enumerate(_time(record, value=lambda one: float(one.loader_queue)))
    ]
    mfu = [_line(one, color=i, style=_style(i)) for i, one in enumerate(_time(record, value=lambda one: one.mfu))]
    drawn = [
        line_chart(
            Chart("steps", "Inner steps per second", "time since start", rates, from_zero=True, seconds=seconds)
        ),
        line_chart(
            Chart("samples", "Samples per second", "time since start", samples, from_zero=True, seconds=seconds)
        ),
        line_chart(
            Chart(
                "mfu",
                "Model FLOPs utilisation",
                "time since start",
                mfu,
                from_zero=True,
                seconds=seconds,
                shares=True,
            )
        ),
        line_chart(
            Chart(
                "loader",
                "Batches ready at the loaders",
                "time since start",
                queue,
                from_zero=True,
                seconds=seconds,
                most_points=60,
            )
        ),
    ]
    if not any(drawn):
        return section("Throughput", empty("No step was logged."), anchor="throughput")
    return section("Throughput", el("div", drawn, class_="charts"), anchor="throughput")


def _over_time(record: RunRecord) -> list[Line]:
    return [_line(one, color=i) for i, one in enumerate(_time(record, value=lambda one: one.loss))]


def _steps(
    record: RunRecord, *, key: str, title: str, value: Callable[[StepMetrics], float | None], log: bool = False
) -> Html:
    lines = [_line(one, color=i, style=_style(i)) for i, one in enumerate(_all(record, value=value))]
    return line_chart(Chart(key, title, "inner step", lines, log=log))


def _all(record: RunRecord, *, value: Callable[[StepMetrics], float | None]) -> list[Curve]:
    return [by_step(record, learner=name, value=value) for name in record.learners]


def _time(record: RunRecord, *, value: Callable[[StepMetrics], float | None]) -> list[Curve]:
    return [by_time(record, learner=name, value=value) for name in record.learners]


def _line(curve: Curve, *, color: int, style: Literal["solid", "dashed"] = "solid") -> Line:
    return Line(curve.name, curve.x, curve.y, color, style)


def _style(index: int) -> Literal["solid", "dashed"]:
    """Every second learner is dashed where curves lie on each other."""
    return "dashed" if index % 2 else "solid"
