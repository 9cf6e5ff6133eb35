"""Latency and queues of the services."""

from __future__ import annotations

from gkr.report.charts import Chart, Line, line_chart
from gkr.report.heat import heat
from gkr.report.markup import Html, el, empty, section, table
from gkr.report.record import RunRecord
from gkr.report.series import ServiceCurves, services
from gkr.report.words import count, number
from spec.events import ServiceStats

_MOST_RANKS = 12


def service(record: RunRecord) -> Html:
    """Per service: p50 and p99 of lately answered requests, and requests waiting per rank."""
    found = services(record)
    drawn = [chart for i, one in enumerate(found) for chart in _charts(record, curves=one, index=i)]
    totals = _totals(record)
    last = _last(record)
    if not drawn and totals is None:
        return section("Services", empty("No service reported."), anchor="services")
    lead = (
        "Time from the arrival of a request to its answer; of several replicas the slowest. A rank's queue is"
        " bounded, so that none can delay another beyond one batch."
    )
    return section("Services", totals, last, el("div", drawn, class_="charts"), anchor="services", lead=lead)


def _totals(record: RunRecord) -> Html | None:
    told = record.summary.services if record.summary else {}
    if not told:
        return None
    rows = [
        [name, count(one.requests), count(one.errors), number(one.p50_ms), number(one.p99_ms)]
        for name, one in told.items()
    ]
    return table(("service", "requests", "errors", "p50 ms", "p99 ms"), rows, numeric=range(1, 5), class_="narrow")


def _last(record: RunRecord) -> Html | None:
    """What each replica and class did, as its last process told."""
    newest = {(one.service, one.learner, one.replica): one for one in record.of(ServiceStats)}
    rows = [
        [
            f"{service}-{replica} of {learner}", name, count(of.requests), number(of.p50_ms), number(of.p99_ms),
            number(one.batch_mean), count(one.duplicates), count(one.cancelled), one.weights[:12],
        ]
        for (service, learner, replica), one in newest.items()
        for name, of in one.by_priority.items()
    ]  # fmt: skip
    if not rows:
        return None
    header = ("replica", "class", "requests", "p50 ms", "p99 ms", "batch", "doubles", "cancelled", "weights")
    return table(header, rows, numeric=range(2, 8), class_="narrow")


def _charts(record: RunRecord, *, curves: ServiceCurves, index: int) -> list[Html]:
    colors = {name: i for i, name in enumerate(record.learners)}
    seconds = record.end - record.start
    latency: list[Line] = []
    for who, curve in curves.p50.items():
        color = colors.get(who, 0)
        latency.append(Line(f"{who} p50", curve.x, curve.y, color))
        latency.append(Line(f"{who} p99", curves.p99[who].x, curves.p99[who].y, color, "dashed"))
    waiting = sorted(curves.queued.items(), key=lambda item: (colors.get(item[0].split("/")[0], 0), item[0]))
    strips = [(curve, colors.get(who.split("/")[0], 0)) for who, curve in waiting[:_MOST_RANKS]]
    more = f", the first {_MOST_RANKS} of {len(waiting)} ranks" if len(waiting) > _MOST_RANKS else ""
    chart = Chart(
        f"latency-{index}",
        f"{curves.name}: latency",
        "time since start",
        latency,
        y_label="ms",
        log=True,
        seconds=seconds,
    )
    return [line_chart(chart), heat(f"{curves.name}: requests waiting{more}", strips, seconds=seconds, unit="requests")]
