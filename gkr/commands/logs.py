"""`gkr logs RUN`: what the processes of a run wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from gkr.options import output_option, run_argument

if TYPE_CHECKING:
    from gkr.logs import LogFile, Selection
    from gkr.runs import Run

_DEFAULT_TAIL = 1000
_POLL_SECONDS = 0.2


@click.command(name="logs")
@run_argument
@click.option(
    "-f", "--follow", is_flag=True, help="Go on printing until the run ends; the exit code is the run's fate."
)
@click.option("--learner", help="Of this learner; `run` means the supervisor and the syncer.")
@click.option("--rank", type=click.IntRange(min=0), help="Of this rank.")
@click.option("--service", help="Of this service's replicas.")
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt; default: the latest.")
@click.option("--all", "everything", is_flag=True, help="Of every process and attempt.")
@click.option(
    "--tail", type=click.IntRange(min=0), help=f"Last lines per process; default: all, or {_DEFAULT_TAIL} with -f."
)
@output_option()
def command(
    *,
    run: str | None,
    follow: bool,
    learner: str | None,
    rank: int | None,
    service: str | None,
    attempt: int | None,
    everything: bool,
    tail: int | None,
    output: str,
) -> int:
    """Print what the processes of a run wrote.

    Without a choice: drivers, every learner's rank 0, and whoever left a traceback.
    """
    from gkr.logs import Selection
    from gkr.output import say
    from gkr.runs import find_run
    from spec.errors import EXIT_INTERRUPTED

    selection = Selection(learner=learner, rank=rank, service=service, attempt=attempt, everything=everything)
    found = find_run(run)
    emit = _json_emitter if output == "json" else _text_emitter
    if not follow:
        return _print_once(found, selection, tail=tail, emit=emit)
    try:
        return _follow(found, selection, tail=_DEFAULT_TAIL if tail is None else tail, emit=emit)
    except KeyboardInterrupt:
        say(f"\nNo longer following; run {found.name} goes on. Come back with `gkr logs -f {found.name}`.")
        return EXIT_INTERRUPTED


Emitter = Callable[["LogFile", str], None]


def _print_once(run: Run, selection: Selection, *, tail: int | None, emit: Emitter) -> int:
    from gkr.logs import find_logs, select, tail_lines
    from gkr.output import say
    from spec.errors import EXIT_OK, NotFoundError

    logs = find_logs(run.path)
    chosen = select(logs, selection=selection)
    if not chosen:
        there = ", ".join(log.prefix for log in logs[:12]) or "none yet"
        raise NotFoundError(f"run {run.name} has no such log", hint=f"there are: {there}")
    for log in chosen:
        lines, left_out = tail_lines(log, count=tail)
        if left_out:
            say(f"{log.prefix}: {left_out} earlier lines are not shown")
        for line in lines:
            emit(log, line)
    return EXIT_OK


def _follow(run: Run, selection: Selection, *, tail: int, emit: Emitter) -> int:
    """Files that appear later (a restarted driver, a rank that starts) join; ends when the run's supervisor is gone."""
    from gkr.logs import clean, find_logs, select, tail_lines
    from gkr.output import say
    from gkr.runs import read_state, supervisor_pid
    from gkr.watch.tail import LineTail

    tails: dict[LogFile, LineTail] = {}
    first = True
    while True:
        alive = supervisor_pid(run.path) is not None
        for log in select(find_logs(run.path), selection=selection):
            if log not in tails:
                # What is there when we come is cut to the tail; a file that appears later is shown from its start.
                size = log.path.stat().st_size if first else 0
                lines, left_out = tail_lines(log, count=tail) if first else ([], 0)
                tails[log] = LineTail(log.path, offset=size)
                if left_out:
                    say(f"{log.prefix}: {left_out} earlier lines are not shown")
                for line in lines:
                    emit(log, line)
            for line in tails[log].read():
                emit(log, clean(line))
        first = False
        if not alive:
            break
        time.sleep(_POLL_SECONDS)
    state = read_state(run.path)
    say(f"run {run.name} {state.status}" + (f": {state.reason}" if state.reason else ""))
    return state.exit_code


def _text_emitter(log: LogFile, line: str) -> None:
    click.echo(f"{log.prefix} | {line}")


def _json_emitter(log: LogFile, line: str) -> None:
    fields = {"learner": log.learner, "attempt": log.attempt, "role": log.role, "index": log.index, "line": line}
    click.echo(json.dumps(fields, ensure_ascii=False))
