"""How full queues were over time.

One strip per rank, darker where more waited. Lines of many ranks would hide each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gkr.report.charts import PALETTE
from gkr.report.markup import Html, el
from gkr.report.series import Curve
from gkr.report.timeline import time_axis
from gkr.report.words import clock

_CELLS = 80


def heat(title: str, strips: Sequence[tuple[Curve, int]], *, seconds: float, unit: str) -> Html:
    """A figure of strips, each with the index of its colour; a cell shows the most of its stretch of time."""
    most = max((value for curve, _ in strips for value in curve.y if math.isfinite(value)), default=0.0)
    rows = [_strip(curve, color=color, seconds=seconds, most=most, unit=unit) for curve, color in strips]
    scale = el("span", f"full colour: {most:g} {unit}" if most > 0 else "never any", class_="note")
    return el(
        "figure", el("figcaption", el("b", title), scale), el("div", rows, time_axis(seconds), class_="lanes heat")
    )


def _strip(curve: Curve, *, color: int, seconds: float, most: float, unit: str) -> Html:
    cells = [0.0] * _CELLS
    for at, value in zip(curve.x, curve.y, strict=True):
        place = min(_CELLS - 1, max(0, int(at / max(seconds, 1e-9) * _CELLS)))
        cells[place] = max(cells[place], value if math.isfinite(value) else 0.0)
    width = seconds / _CELLS
    bars = (
        el(
            "rect",
            el("title", f"{clock(i * width)}: {value:g} {unit}"),
            x=i,
            width=1,
            y=0,
            height=10,
            fill_opacity=f"{value / most:.2f}",
        )
        for i, value in enumerate(cells)
        if value > 0
    )
    svg = el(
        "svg",
        *bars,
        viewBox=f"0 0 {_CELLS} 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{curve.name}: at most {max(cells):g} {unit}",
    )
    return el(
        "div",
        el("span", curve.name, class_="lane-name"),
        el("div", svg, class_="lane-bar"),
        class_=f"lane l{color % PALETTE}",
    )
