"""`gkr describe RUN`: one run in full."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from gkr.options import output_option, run_argument

if TYPE_CHECKING:
    from gkr.runs import Run, RunState
    from gkr.watch.view import View


@click.command(name="describe")
@run_argument
@output_option()
def command(*, run: str | None, output: str) -> None:
    """Show one run: state, learners, sync, services, recoveries, files."""
    from gkr.attend import read_summary
    from gkr.backend import find_run, refresh
    from gkr.output import result, result_json
    from gkr.plan_file import read_plan
    from gkr.runs import read_state
    from gkr.watch.tail import EventTail
    from gkr.watch.view import ended, fold, initial_view

    found = find_run(run)
    refresh(found)
    state = read_state(found.path)
    plan = read_plan(found.path)
    view = initial_view(plan)
    for event in EventTail(found.path).read():
        view = fold(view, event)
    if state.status == "lost":
        view = ended(view)
    if output == "json":
        summary = read_summary(found)
        fields = {"run": found.name, "experiment": found.experiment, "path": f"{found.path}", "created": found.created}
        ending = {"status": state.status, "reason": state.reason, "exit_code": state.exit_code}
        documents = {
            "plan": json.loads(plan.model_dump_json()),
            "summary": json.loads(summary.write_json()) if summary else None,
        }
        result_json({**fields, **ending, **documents})
        return
    for line in _lines(found, state, view):
        result(line)


def _lines(run: Run, state: RunState, view: View) -> list[str]:
    from gkr.watch.text import percent, short_count

    share = percent(view.samples, view.target_samples)
    done = f"{short_count(view.samples)} of {short_count(view.target_samples)} samples ({share})"
    lines = [
        f"run         {run.name}",
        f"experiment  {run.experiment}",
        f"status      {state.status}" + (f": {state.reason}" if state.reason else ""),
        f"progress    {done}",
        f"started     {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(run.created))}",
        f"folder      {run.path}",
    ]
    if state.status == "lost":
        lines.append(f"remedy      gkr resume {run.name}")
    return [*lines, *_learner_lines(view), *_sync_lines(view), *_service_lines(view), *_happened(view)]


def _learner_lines(view: View) -> list[str]:
    from gkr.output import table

    header = ["LEARNER", "CLUSTER", "RANKS", "STATE", "ATTEMPT", "STEP", "LOSS", "STEPS/S", "ROUND", "CHECKPOINT"]
    rows = [
        [
            one.name,
            one.cluster,
            f"{one.world_size}",
            one.state,
            f"{one.attempt}",
            f"{one.step}",
            "" if one.loss is None else f"{one.loss:.4g}",
            f"{one.steps_per_second:.3g}",
            f"{one.round}",
            "" if one.checkpoint_step is None else f"step {one.checkpoint_step}",
        ]
        for one in view.learners.values()
    ]
    return ["", table(rows, header=header)]


def _sync_lines(view: View) -> list[str]:
    if view.sync is None:
        return []
    sync = view.sync
    waiting = f", waits for {', '.join(sync.waiting_for)}" if sync.waiting_for else ""
    return [
        "",
        f"sync: version {sync.version}, {sync.samples_total} samples merged{waiting}{', final' if sync.final else ''}",
    ]


def _service_lines(view: View) -> list[str]:
    from gkr.output import table
    from gkr.watch.text import milliseconds

    if not view.services:
        return []
    rows = [
        [
            name,
            f"{one.requests}",
            f"{one.errors}",
            milliseconds(one.p50_ms, of=one.requests),
            milliseconds(one.p99_ms, of=one.requests),
            f"{one.queued}",
        ]
        for name, one in sorted(view.services.items())
    ]
    return ["", table(rows, header=["SERVICE", "REQUESTS", "ERRORS", "P50 MS", "P99 MS", "QUEUED"])]


def _happened(view: View) -> list[str]:
    from gkr.watch.lines import recovery_line, score_line

    lines = [score_line(view.score)] if view.score else []
    lines += [recovery_line(one) for one in view.recoveries]
    lines += [f"{one.level}: {one.text}" for one in view.notes]
    return ["", *lines] if lines else []
