"""`gkr ps`: runs and their state."""

from __future__ import annotations

import time

import click

from gkr.options import output_option
from gkr.output import result, result_json, say, table
from gkr.runs import FINAL, Run, RunState, list_runs, read_state, runs_root

_SHOWN = 20


@click.command(name="ps")
@click.option("-a", "--all", "everything", is_flag=True, help=f"All runs, not only the newest {_SHOWN}.")
@output_option()
def command(*, everything: bool, output: str) -> None:
    """List runs, newest first."""
    runs = list_runs()
    shown = runs if everything else runs[:_SHOWN]
    rows = [(run, read_state(run.path)) for run in shown]
    if output == "json":
        result_json([_fields(run, state) for run, state in rows])
        return
    if not rows:
        say(f"There are no runs in {runs_root()}. `gkr launch FILE` starts one.")
        return
    cells = [
        [run.name, run.experiment, state.status, _took(state), _ago(run.created), state.reason[:80]]
        for run, state in rows
    ]
    result(table(cells, header=["RUN", "EXPERIMENT", "STATUS", "TOOK", "AGE", "REASON"]))
    if len(runs) > len(shown):
        say(f"{len(runs) - len(shown)} older runs are not shown; `gkr ps --all` shows them.")
    for run, state in rows:
        if state.status == "lost":
            say(f"{run.name} is lost: {state.reason}. `gkr resume {run.name}` goes on from its checkpoints.")


def _fields(run: Run, state: RunState) -> dict[str, object]:
    return {
        "run": run.name,
        "experiment": run.experiment,
        "status": state.status,
        "reason": state.reason,
        "exit_code": state.exit_code,
        "created": run.created,
        "path": f"{run.path}",
    }


def _took(state: RunState) -> str:
    from gkr.watch.text import short_duration

    if not state.started:
        return ""
    end = state.changed if state.status in FINAL or state.status == "lost" else time.time()
    return short_duration(end - state.started)


def _ago(created: float) -> str:
    from gkr.watch.text import short_duration

    return short_duration(time.time() - created)
