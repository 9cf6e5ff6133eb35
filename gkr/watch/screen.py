"""The live screen: one frame is a pure function of the view and the time; rich only draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gkr.watch.lines import recovery_line, score_line
from gkr.watch.text import milliseconds, percent, short_count, short_duration, sparkline
from gkr.watch.view import LearnerView, SyncView, View

_COLOURS = {
    "succeeded": "green",
    "running": "green",
    "preparing": "blue",
    "failed": "red",
    "cancelled": "yellow",
    "lost": "red",
}
_BAR_WIDTH = 36
_LEAST_BAR = 10
_SPARK_WIDTH = 32
_LEAST_SPARK = 8
_BORDER = 4
_GAP = 2
_SPARK = ""
"""The header of the loss line."""


def frame(view: View, *, now: float, width: int, ascii_only: bool = False) -> RenderableType:
    """All of it, `width` columns wide; what matters less gives way where there is no room. `now` is in seconds since
    1970.
    """
    room = width - _BORDER
    parts: list[RenderableType] = [
        _progress(view, now=now, room=room),
        _learners(view, room=room, ascii_only=ascii_only),
    ]
    if view.sync is not None:
        parts.append(_sync(view.sync, now=now))
    if view.services:
        parts.append(_services(view, room=room))
    parts += _happened(view)
    title = Text.assemble(
        (f"{view.experiment} ", "bold"), (view.status, _COLOURS.get(view.status, "blue")), (f" {view.run}", "dim")
    )
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def _progress(view: View, *, now: float, room: int) -> RenderableType:
    elapsed = short_duration(now - view.started) if view.started else "0s"
    share = percent(view.samples, view.target_samples)
    words = [f"{share} {short_count(view.samples)} of {short_count(view.target_samples)} samples", f"elapsed {elapsed}"]
    if view.eta_seconds is not None:
        words.append(f"about {short_duration(view.eta_seconds)} left")
    text = (" " * _GAP).join(words)
    bar_width = min(_BAR_WIDTH, room - cell_len(text) - _GAP)
    if bar_width < _LEAST_BAR:
        return Text(text)
    grid = Table.grid(padding=(0, _GAP))
    grid.add_row(ProgressBar(total=max(1, view.target_samples), completed=view.samples, width=bar_width), text)
    return grid


def _learners(view: View, *, room: int, ascii_only: bool) -> RenderableType:
    cells = [_learner_cells(learner) for learner in view.learners.values()]
    columns = {name: [row[name] for row in cells] for name in cells[0]} if cells else {}
    columns[_SPARK] = [Text(" " * _LEAST_SPARK) for _ in cells]
    kept = _fitting(columns, room=room, first_to_go=("queue", "saved", _SPARK, "stood still", "round", "steps/s"))
    if _SPARK in kept:
        spare = room - _needed(kept)
        width = min(_SPARK_WIDTH, _LEAST_SPARK + max(0, spare))
        lines = [sparkline(one.losses, width=width, ascii_only=ascii_only) for one in view.learners.values()]
        kept[_SPARK] = [Text(line, style="cyan") for line in lines]
    return _table(kept, left={"learner", "state", _SPARK, "saved", "stood still"}, wrapped={"state"})


def _needed(columns: Mapping[str, Sequence[Text]]) -> int:
    """Cells that the columns take side by side."""
    widths = [max([cell_len(name), *(one.cell_len for one in cells)]) for name, cells in columns.items()]
    return sum(widths) + _GAP * (len(widths) - 1)


def _fitting(columns: Mapping[str, list[Text]], *, room: int, first_to_go: Sequence[str]) -> dict[str, list[Text]]:
    """The columns without those, in this order, for which there is no room."""
    kept = dict(columns)
    for name in first_to_go:
        if _needed(kept) <= room:
            break
        del kept[name]
    return kept


def _table(columns: Mapping[str, Sequence[Text]], *, left: set[str], wrapped: set[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=name not in wrapped, justify="left" if name in left else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _learner_cells(learner: LearnerView) -> dict[str, Text]:
    blocked = ", ".join(f"{cause} {short_duration(seconds)}" for cause, seconds in _longest(learner.blocked_seconds))
    attempt = f" #{learner.attempt}" if learner.attempt > 1 else ""
    return {
        "learner": Text(f"{learner.name} x{learner.world_size}", style="bold"),
        "state": Text(learner.state + attempt, style="yellow" if learner.state.startswith("recovering") else ""),
        "step": Text(f"{learner.step}"),
        "loss": Text("" if learner.loss is None else f"{learner.loss:.4g}"),
        _SPARK: Text(),
        "steps/s": Text(f"{learner.steps_per_second:.3g}"),
        "round": Text(f"{learner.round}"),
        "queue": Text(f"{learner.loader_queue}"),
        "saved": Text("" if learner.checkpoint_step is None else f"step {learner.checkpoint_step}"),
        "stood still": Text(blocked),
    }


def _longest(blocked: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(((cause, value) for cause, value in blocked.items() if value >= 0.5), key=lambda one: -one[1])[:2]


def _sync(sync: SyncView, *, now: float) -> Text:
    text = Text.assemble(
        ("outer round ", "dim"), f"{sync.version + 1}" if not sync.final else f"{sync.version} (final)"
    )
    if sync.waiting_for:
        text.append(f"  waits for {', '.join(sync.waiting_for)}", style="yellow")
        if sync.deadline is not None:
            text.append(f", at most {short_duration(sync.deadline - now)} more")
        if sync.arrived:
            text.append(f"  (here: {', '.join(sync.arrived)})", style="dim")
    if sync.version:
        text.append(f"  last open {sync.open_seconds:.1f} s", style="dim")
    return text


def _services(view: View, *, room: int) -> RenderableType:
    stats = [one for _, one in sorted(view.services.items())]
    columns = {
        "service": [Text(name) for name in sorted(view.services)],
        "requests": [Text(f"{one.requests}") for one in stats],
        "p50 ms": [Text(milliseconds(one.p50_ms, of=one.requests)) for one in stats],
        "p99 ms": [Text(milliseconds(one.p99_ms, of=one.requests)) for one in stats],
        "queued": [Text(f"{one.queued}") for one in stats],
        "errors": [Text(f"{one.errors}", style="red" if one.errors else "") for one in stats],
    }
    kept = _fitting(columns, room=room, first_to_go=("p50 ms", "queued", "requests"))
    return _table(kept, left={"service"}, wrapped=set())


def _happened(view: View) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if view.score is not None:
        lines.append(Text(score_line(view.score)))
    lines += [Text(recovery_line(recovery), style="yellow") for recovery in view.recoveries[-3:]]
    colours = {"info": "", "warning": "yellow", "error": "red"}
    lines += [Text(note.text, style=colours[note.level]) for note in view.notes[-3:]]
    if view.reason:
        lines.append(Text(view.reason, style=_COLOURS.get(view.status, "")))
    return lines
