"""Following a run until it ends: live on a terminal, plain lines elsewhere. Interrupting it never touches the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TextIO

from gkr.backend import backend_of
from gkr.plan_file import read_plan
from gkr.runs import FINAL, Run, RunState, read_state
from gkr.watch.lines import LineWriter
from gkr.watch.tail import EventTail
from gkr.watch.view import View, initial_view
from spec.events import Event, RunStatus

_PLAIN_TERMINALS = frozenset({"dumb", "unknown"})
"""Without a cursor that moves, such as a shell inside an editor: rich would draw nothing until the end."""
_CONCLUDE_SECONDS = 120.0
"""Summary and report are made within this after a run's last event, or we go without them."""


def follow(run: Run, *, stream: TextIO, live: bool | None = None) -> RunState:
    """Show the run on `stream` (stderr) until it has ended and its report is made, or until it is lost.

    The state it ended in.
    """
    plan = read_plan(run.path)
    view = initial_view(plan)
    if live if live is not None else stream.isatty() and os.environ.get("TERM") not in _PLAIN_TERMINALS:
        _follow_live(run, view, stream)
    else:
        _follow_lines(run, view, stream)
    return read_state(run.path)


def events_until_end(run: Run) -> Iterator[list[Event]]:
    """Batches of new events (an empty one at each look), ending when nothing more will come.

    That is when the supervisor is gone, or when the objects in the clusters have ended.
    """
    tail = EventTail(run.path)
    give_up: float | None = None
    with closing(backend_of(run).attach(run)) as attachment:
        while True:
            more = attachment.refresh()  # asked before reading: what was written before the end is read below
            events = tail.read()
            yield events
            if not more:
                return
            if any(isinstance(event, RunStatus) and event.status in FINAL for event in events):
                give_up = time.monotonic() + _CONCLUDE_SECONDS
            if give_up is not None and time.monotonic() > give_up:
                return
            time.sleep(attachment.poll_seconds)


def _follow_lines(run: Run, view: View, stream: TextIO) -> None:
    writer = LineWriter(view)
    for events in events_until_end(run):
        for event in events:
            for line in writer.feed(event):
                print(line, file=stream, flush=True)


def _follow_live(run: Run, view: View, stream: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live

    from gkr.watch.screen import frame
    from gkr.watch.view import fold

    console = Console(file=stream)
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    with Live(console=console, refresh_per_second=5, transient=False, auto_refresh=False) as live:
        for events in events_until_end(run):
            for event in events:
                view = fold(view, event)
            live.update(frame(view, now=time.time(), width=console.width, ascii_only=ascii_only), refresh=True)
