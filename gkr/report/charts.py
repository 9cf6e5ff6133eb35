"""Line and bar charts as inline SVG that takes its colours from the page.

matplotlib draws with marker colours that are replaced by CSS variables afterwards, so one drawing serves light and
dark. Names from a run never reach matplotlib (legends are HTML): what it draws as text is ours. The same input gives
the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from gkr.report.markup import Html, el, escape, join
from gkr.report.words import clock, clock_step, percent

PALETTE = 6
"""Learner colours before they repeat (variables --l0 .. --l5 of the style sheet)."""

_SENTINELS = {
    "#0a0b01": "currentColor",
    "#0a0b02": "var(--grid)",
    "#0a0b03": "var(--merged)",
    **{f"#0a0c0{i}": f"var(--l{i})" for i in range(PALETTE)},
}
_STEPS = [1, 2, 2.5, 5, 10]
_TEXT, _GRID, _MERGED = list(_SENTINELS)[:3]


@dataclass(frozen=True)
class Line:
    """One series; a non-finite y breaks the line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int | Literal["merged"]
    """Index of a learner, or a role."""
    style: Literal["solid", "dashed", "points"] = "solid"
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of lines over one axis."""

    key: str
    """Unique in the page; prefixes the ids inside the SVG."""
    title: str
    x_label: str
    lines: Sequence[Line]
    y_label: str = ""
    log: bool = False
    from_zero: bool = False
    marks: Sequence[float] = ()
    """Thin vertical lines, for example at outer rounds."""
    shares: bool = False
    """y is a share and reads as per cent."""
    seconds: float | None = None
    """x is time since the start of a run that took so long: the axis spans the run and reads as a clock."""
    most_points: int = 300
    note: str = ""


def swatch(color: int | str, style: str = "solid") -> Html:
    """The sample of a legend."""
    name = f"l{color % PALETTE}" if isinstance(color, int) else color
    return el("i", class_=f"swatch {name} {style}", aria_hidden="true")


def legend(entries: Sequence[tuple[str, int | str, str]]) -> Html:
    """(name, color, style) as one line above a chart."""
    return el("p", (el("span", swatch(color, style), name) for name, color, style in entries), class_="legend")


def line_chart(chart: Chart) -> Html:
    """A figure with heading, legend and drawing."""
    lines = [one for one in chart.lines if any(math.isfinite(value) for value in one.y)]
    if not lines:
        return Html("")
    names = list(dict.fromkeys((one.name, one.color, one.style) for one in lines))
    svg = _svg(lambda axes: _draw_lines(axes, chart=chart, lines=lines), key=chart.key, title=_spoken(chart, lines))
    note = el("span", chart.note, class_="note") if chart.note else None
    return el(
        "figure",
        el("figcaption", el("b", chart.title), note),
        legend(names) if len(names) > 1 else None,
        svg,
        class_="chart",
    )


def bar_chart(chart: Chart) -> Html:
    """The same for grouped bars: every line is one group member over the same whole-number x."""
    if not any(one.y for one in chart.lines):
        return Html("")
    svg = _svg(lambda axes: _draw_bars(axes, chart=chart), key=chart.key, title=_spoken(chart, chart.lines))
    names = [(one.name, one.color, "bar") for one in chart.lines]
    note = el("span", chart.note, class_="note") if chart.note else None
    return el("figure", el("figcaption", el("b", chart.title), note), legend(names), svg, class_="chart")


def thin(x: Sequence[float], y: Sequence[float], *, most: int) -> tuple[list[float], list[float]]:
    """Means over runs of neighbours so that at most about `most` points are drawn; gaps (non-finite y) stay gaps."""
    step = max(1, math.ceil(len(x) / most))
    if step == 1:
        return list(x), list(y)
    xs: list[float] = []
    ys: list[float] = []
    for i in range(0, len(x), step):
        part = list(zip(x[i : i + step], y[i : i + step], strict=True))
        finite = [pair for pair in part if math.isfinite(pair[1])]
        if finite:
            xs.append(sum(pair[0] for pair in finite) / len(finite))
            ys.append(sum(pair[1] for pair in finite) / len(finite))
        if len(finite) < len(part):
            xs.append(part[-1][0])
            ys.append(math.nan)
    return xs, ys


def _spoken(chart: Chart, lines: Sequence[Line]) -> str:
    """What a screen reader says: the last value of each line."""
    ends = [(one.name, [value for value in one.y if math.isfinite(value)]) for one in lines]
    said = ", ".join(f"{name} ends at {values[-1]:.4g}" for name, values in ends if values)
    return f"{chart.title} over {chart.x_label}: {said}"


def _color(color: int | str) -> str:
    if isinstance(color, int):
        return f"#0a0c0{color % PALETTE}"
    return _MERGED


def _draw_lines(axes: Any, *, chart: Chart, lines: Sequence[Line]) -> None:
    positive = [v for one in lines for v in one.y if math.isfinite(v) and v > 0]
    log = chart.log and bool(positive) and max(positive) / min(positive) > 5
    for mark in chart.marks:
        axes.axvline(mark, color=_GRID, linewidth=0.6, linestyle=(0, (2, 2)), zorder=0)
    for one in lines:
        x, y = thin(one.x, [value if not log or value > 0 else math.nan for value in one.y], most=chart.most_points)
        lonely = sum(map(math.isfinite, y)) < 2
        dots: dict[str, Any] = (
            {"marker": "o", "markersize": 4 if one.style == "points" else 3} if one.style == "points" or lonely else {}
        )
        dash = {"solid": "-", "points": "-", "dashed": (0, (4, 2))}[one.style]
        width = 0.9 if one.faint else 1.1 if one.style == "points" else 1.6
        axes.plot(
            x, y, color=_color(one.color), linewidth=width, linestyle=dash, alpha=0.55 if one.faint else 1, **dots
        )
    if log:
        _log_axis(axes, low=min(positive), high=max(positive))
    elif chart.from_zero:
        axes.set_ylim(bottom=0, top=max([*positive, 1e-9]) * 1.08)
    _finish(axes, chart=chart)


def _draw_bars(axes: Any, *, chart: Chart) -> None:
    width = 0.8 / max(1, len(chart.lines))
    for i, one in enumerate(chart.lines):
        offset = (i - (len(chart.lines) - 1) / 2) * width
        values = [value if math.isfinite(value) else 0.0 for value in one.y]
        axes.bar([value + offset for value in one.x], values, width=width * 0.92, color=_color(one.color), linewidth=0)
    axes.set_ylim(
        bottom=0, top=max([value for one in chart.lines for value in one.y if math.isfinite(value)] + [1e-9]) * 1.08
    )
    _finish(axes, chart=chart)


def _log_axis(axes: Any, *, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(low * 0.9, high * 1.1)
    decades = range(math.floor(math.log10(low * 0.9)), math.ceil(math.log10(high * 1.1)) + 1)
    digits = (1, 2, 5) if len(decades) < 5 else (1,)
    ticks = [
        digit * 10.0**power for power in decades for digit in digits if low * 0.9 <= digit * 10.0**power <= high * 1.1
    ]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))


def _plain(value: float, _: int | None) -> str:
    return f"{value:g}"


def _percent(value: float, _: int | None) -> str:
    return percent(value, digits=0)


def _clock(value: float, _: int | None) -> str:
    return clock(value)


def _finish(axes: Any, *, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    axes.set_xlabel(chart.x_label, parse_math=False)
    if chart.y_label:
        axes.set_ylabel(chart.y_label, parse_math=False)
    axes.margins(x=0.02)
    if chart.seconds is not None:
        axes.set_xlim(0, max(chart.seconds, 1e-9))
        axes.xaxis.set_major_locator(MultipleLocator(clock_step(chart.seconds, most=6)))
        axes.xaxis.set_major_formatter(FuncFormatter(_clock))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=_STEPS))
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=_STEPS))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent if chart.shares else _plain))
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=4)
    axes.tick_params(axis="x", pad=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _svg(draw: Callable[[Any], None], *, key: str, title: str) -> Html:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[str, Any] = {
        "svg.hashsalt": key,
        "svg.fonttype": "none",
        "font.size": 10,
        "axes.labelsize": 10,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "axes.edgecolor": _GRID,
        "path.simplify": True,
        "font.family": ["DejaVu Sans"],
    }
    with mpl.rc_context(cast(Any, settings)):
        figure = Figure(figsize=(5.2, 2.75), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        draw(axes)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(out.getvalue(), key=key, title=title)


def _inline(svg: str, *, key: str, title: str) -> Html:
    """The drawing alone, with unique ids, the page's colours and font, and a size that follows the page."""
    body = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="([^"]+)"', body)
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'id="([^"]+)"', rf'id="{key}-\1"', body)
    body = re.sub(r'(xlink:href="|href="|url\()#', rf"\g<1>#{key}-", body).replace("xlink:href", "href")
    body = re.sub(r"font: (\d+(?:\.\d+)?)px [^;\"]+", r"font-size: \1px", body)
    for sentinel, color in _SENTINELS.items():
        body = body.replace(sentinel, color)
    body = re.sub(r"\n\s*", "\n", body)
    head = f'<svg viewBox="{box[1] if box else ""}" role="img" aria-labelledby="{escape(key)}-title">'
    return join(Html(head), el("title", title, id=f"{key}-title"), Html(body))
