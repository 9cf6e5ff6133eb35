"""The live screen: one frame is a pure function of the view and the time; rich only draws it."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gkr.watch.lines import recovery_line, score_line
from gkr.watch.text import percent, short_count, short_duration, sparkline
from gkr.watch.view import LearnerView, SyncView, View

_COLOURS = {
    "succeeded": "green",
    "running": "green",
    "preparing": "blue",
    "failed": "red",
    "cancelled": "yellow",
    "lost": "red",
}
_SPARK_WIDTH = 32


def frame(view: View, *, now: float, ascii_only: bool = False) -> RenderableType:
    """All of it. `now` is in seconds since 1970."""
    parts: list[RenderableType] = [_progress(view, now=now), _learners(view, ascii_only=ascii_only)]
    if view.sync is not None:
        parts.append(_sync(view.sync, now=now))
    if view.services:
        parts.append(_services(view))
    parts += _happened(view)
    title = Text.assemble(
        (f"{view.experiment} ", "bold"), (view.run, "dim"), "  ", (view.status, _COLOURS.get(view.status, "blue"))
    )
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def _progress(view: View, *, now: float) -> RenderableType:
    elapsed = short_duration(now - view.started) if view.started else "0s"
    left = f"about {short_duration(view.eta_seconds)} left" if view.eta_seconds is not None else ""
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, view.target_samples), completed=view.samples, width=36)
    share = percent(view.samples, view.target_samples)
    amount = f"{share} {short_count(view.samples)} of {short_count(view.target_samples)} samples"
    grid.add_row(bar, amount, f"elapsed {elapsed}", left)
    return grid


def _learners(view: View, *, ascii_only: bool) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("learner", "state", "step", "loss", "", "steps/s", "round", "queue", "saved", "stood still"):
        table.add_column(
            column,
            no_wrap=column != "state",
            justify="right" if column in {"step", "steps/s", "round", "queue"} else "left",
        )
    for learner in view.learners.values():
        table.add_row(*_learner_cells(learner, ascii_only=ascii_only))
    return table


def _learner_cells(learner: LearnerView, *, ascii_only: bool) -> list[str | Text]:
    blocked = ", ".join(f"{cause} {short_duration(seconds)}" for cause, seconds in _longest(learner.blocked_seconds))
    attempt = f" #{learner.attempt}" if learner.attempt > 1 else ""
    return [
        Text(f"{learner.name} x{learner.world_size}", style="bold"),
        Text(learner.state + attempt, style="yellow" if learner.state.startswith("recovering") else ""),
        f"{learner.step}",
        "" if learner.loss is None else f"{learner.loss:.4g}",
        Text(sparkline(learner.losses, width=_SPARK_WIDTH, ascii_only=ascii_only), style="cyan"),
        f"{learner.steps_per_second:.3g}",
        f"{learner.round}",
        f"{learner.loader_queue}",
        "" if learner.checkpoint_step is None else f"step {learner.checkpoint_step}",
        blocked,
    ]


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


def _services(view: View) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("service", "requests", "p50 ms", "p99 ms", "queued", "errors"):
        table.add_column(column, justify="left" if column == "service" else "right", no_wrap=True)
    for name, stats in sorted(view.services.items()):
        errors = Text(f"{stats.errors}", style="red" if stats.errors else "")
        table.add_row(
            name, f"{stats.requests}", f"{stats.p50_ms:.1f}", f"{stats.p99_ms:.1f}", f"{stats.queued}", errors
        )
    return table


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
