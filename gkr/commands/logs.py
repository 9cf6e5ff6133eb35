"""`gkr logs RUN`: what the processes of a run wrote."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from gkr.options import output_option, run_argument

if TYPE_CHECKING:
    from gkr.log_output import Printer
    from gkr.logs import LogFile, Selection
    from gkr.runs import Run

_DEFAULT_TAIL = 1000
_POLL_SECONDS = 0.2


def _pattern(ctx: click.Context, param: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(value) if value is not None else None
    except re.error as error:
        raise click.BadParameter(f"{error}", ctx=ctx, param=param) from None


def _since(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A duration as seconds; checked here so that it is a usage error."""
    if value is None:
        return None
    from spec.units import parse_duration  # pydantic: completion passes here without a value

    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}", ctx=ctx, param=param) from None


@click.command(name="logs")
@run_argument
@click.option(
    "-f", "--follow", is_flag=True, help="Go on printing until the run ends; the exit code is the run's fate."
)
@click.option("--learner", help="Of this learner; `run` means the supervisor and the syncer.")
@click.option("--rank", type=click.IntRange(min=0), help="Of this rank.")
@click.option("--service", help="Of this service's replicas.")
@click.option("--role", help="Of this role: driver, rank, agent; or a pod's: head, trainer, service, syncer.")
@click.option("--group", help="Of this group's pods.")
@click.option("--node", help="Of the pods on this node.")
@click.option("--pod", help="Of the pods whose name begins so.")
@click.option("--container", help="Of this container of the pods; default: the main one.")
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt; default: the latest.")
@click.option("--prev", "previous", is_flag=True, help="Of the attempt, or the container, before the latest.")
@click.option("--failed", is_flag=True, help="Only of the process that failed first.")
@click.option("--all", "everything", is_flag=True, help="Of every process and attempt.")
@click.option("--grep", metavar="REGEX", callback=_pattern, help="Only lines in which this is found.")
@click.option("--since", metavar="DURATION", callback=_since, help="Only of the last 90s, 10m or 2h; of live pods.")
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
    role: str | None,
    group: str | None,
    node: str | None,
    pod: str | None,
    container: str | None,
    attempt: int | None,
    previous: bool,
    failed: bool,
    everything: bool,
    grep: re.Pattern[str] | None,
    since: float | None,
    tail: int | None,
    output: str,
) -> int:
    """Print what the processes of a run wrote, those of all pods together.

    Without a choice: drivers, every learner's rank 0, and whoever left a traceback. Of pods that are gone, what they
    left in the bucket.
    """
    from gkr.backend import find_run
    from gkr.log_output import Printer
    from gkr.logs import Selection
    from gkr.output import say
    from gkr.runs import is_on_clusters
    from spec.errors import EXIT_INTERRUPTED

    selection = Selection(
        learner=learner, rank=rank, service=service, role=role, attempt=attempt, previous=previous,
        everything=everything,
    )  # fmt: skip
    found = find_run(run)
    printer = Printer(as_json=output == "json", pattern=grep)
    tail = _DEFAULT_TAIL if tail is None and follow else tail
    try:
        if is_on_clusters(found.path):
            from gkr.cluster.logs_command import Pods, follow_pods, print_pods

            pods = Pods(group=group, node=node, pod=pod, container=container, since=since, failed=failed)
            act = follow_pods if follow else print_pods
            return act(found, selection, pods=pods, tail=tail, printer=printer)
        _refuse_pods(group=group, node=node, pod=pod, container=container, since=since)
        if follow:
            return _follow(found, selection, tail=tail or 0, printer=printer)
        return _print_once(found, selection, tail=tail, failed=failed, printer=printer)
    except KeyboardInterrupt:
        say(f"\nNo longer following; run {found.name} goes on. Come back with `gkr logs -f {found.name}`.")
        return EXIT_INTERRUPTED


def _refuse_pods(**given: object) -> None:
    asked = [f"--{name}" for name, value in given.items() if value is not None]
    if asked:
        raise click.UsageError(f"{', '.join(asked)}: this run is on this machine, where there are no pods")


def _print_once(run: Run, selection: Selection, *, tail: int | None, failed: bool, printer: Printer) -> int:
    from gkr.logs import find_logs, first_failed, select, tail_lines
    from gkr.output import say
    from spec.errors import EXIT_OK, NotFoundError

    logs = find_logs(run.path)
    chosen = first_failed(select(logs, selection=selection)) if failed else select(logs, selection=selection)
    if not chosen:
        there = ", ".join(log.prefix for log in logs[:12]) or "none yet"
        what = "failed process" if failed else "such log"
        raise NotFoundError(f"run {run.name} has no {what}", hint=f"there are: {there}")
    for log in chosen:
        lines, left_out = tail_lines(log, count=tail)
        if left_out:
            say(f"{log.prefix}: {left_out} earlier lines are not shown")
        for line in lines:
            printer.file_line(log, line)
    return EXIT_OK


def _follow(run: Run, selection: Selection, *, tail: int, printer: Printer) -> int:
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
                    printer.file_line(log, line)
            for line in tails[log].read():
                printer.file_line(log, clean(line))
        first = False
        if not alive:
            break
        time.sleep(_POLL_SECONDS)
    state = read_state(run.path)
    say(f"run {run.name} {state.status}" + (f": {state.reason}" if state.reason else ""))
    return state.exit_code
