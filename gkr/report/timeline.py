"""The lanes of a run as a drawing that stretches with the page: bars are SVG without proportions, words are HTML."""

from __future__ import annotations

from collections.abc import Sequence

from gkr.report.charts import PALETTE
from gkr.report.lanes import Lane, Span, visible
from gkr.report.markup import Html, el, join
from gkr.report.words import clock, clock_step

_STATES = (
    ("starting", "starting"),
    ("training", "training"),
    ("waiting", "waiting at the barrier"),
    ("ahead", "waiting: too far ahead"),
    ("applying", "snapshot and apply"),
    ("restarting", "restart"),
    ("flying", "contribution in flight, training goes on"),
    ("collecting", "syncer has some, waits for the rest"),
    ("merging", "syncer merges and commits"),
)
_STRIP = (7, 3)
"""Where a lane shows what happens beside training: its top and height, of 10."""
_WIDE = 1000
"""Units of the drawing from the first to the last moment."""


def timeline(lanes: Sequence[Lane], *, start: float, end: float) -> Html:
    """One row per lane over a common axis of time since the start."""
    seconds = max(end - start, 1e-9)
    rows = [_row(lane, start=start, seconds=seconds) for lane in lanes]
    return el("div", _legend(lanes), el("div", rows, time_axis(seconds), class_="lanes"), class_="timeline")


def _row(lane: Lane, *, start: float, seconds: float) -> Html:
    color = f"l{lane.learner % PALETTE}" if lane.learner is not None else "syncer"
    bars = (_bar(one, start=start, seconds=seconds) for one in visible(lane.spans))
    svg = el(
        "svg",
        *bars,
        viewBox=f"0 0 {_WIDE} 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"timeline of {lane.name}",
    )
    marks = (
        el(
            "i",
            class_="mark",
            title=one.label,
            style=f"left:{_share(one.time - start, seconds) * 100:.2f}%",
            tabindex="0",
        )
        for one in lane.marks
    )
    return el(
        "div",
        el("span", lane.name, class_="lane-name"),
        el("div", svg, *marks, class_="lane-bar"),
        class_=f"lane {color}",
    )


def _bar(span: Span, *, start: float, seconds: float) -> Html:
    left = _share(span.start - start, seconds) * _WIDE
    right = _share(span.end - start, seconds) * _WIDE
    top, height = _STRIP if span.state == "flying" else (0, 10)
    return el(
        "rect",
        el("title", span.label),
        x=f"{left:.2f}",
        width=f"{max(right - left, 0.4):.2f}",
        y=top,
        height=height,
        class_=span.state,
    )


def _share(offset: float, seconds: float) -> float:
    return min(1.0, max(0.0, offset / seconds))


def time_axis(seconds: float) -> Html:
    """Clock ticks below lanes."""
    step = clock_step(seconds, most=7)
    ticks: list[Html] = []
    at = 0.0
    while at <= seconds * 0.97:
        ticks.append(el("span", clock(at), style=f"left:{at / seconds * 100:.2f}%"))
        at += step
    return el("div", el("span", class_="lane-name"), el("div", ticks, class_="axis"), class_="lane")


def _legend(lanes: Sequence[Lane]) -> Html:
    used = {one.state for lane in lanes for one in lane.spans}
    keys = (
        el("span", el("i", class_=f"key {state}", aria_hidden="true"), words)
        for state, words in _STATES
        if state in used
    )
    died = (
        el("span", el("i", class_="key mark", aria_hidden="true"), "recovery")
        if any(lane.marks for lane in lanes)
        else None
    )
    return el("p", join(*keys), died, class_="legend")
