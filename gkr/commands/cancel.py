"""`gkr cancel RUN`: end a run and wait until nothing of it is left."""

from __future__ import annotations

import click

from gkr.options import output_option, run_argument

_MARGIN_SECONDS = 90.0
"""Beyond the grace: two stages of stopping (drivers, then syncer), then summary and report."""


@click.command(name="cancel")
@run_argument
@click.option("--now", is_flag=True, help="Kill at once instead of letting processes finish what they write.")
@output_option()
def command(*, run: str | None, now: bool, output: str) -> None:
    """End a run and wait until nothing of it is alive. Its checkpoints, logs and report stay."""
    from gkr.backend import backend_of, find_run
    from gkr.output import result, result_json, say
    from gkr.plan_file import read_plan
    from gkr.runs import FINAL, read_state
    from spec.errors import DataError
    from spec.limits import TimeoutConfig

    found = find_run(run)
    before = read_state(found.path).status
    if before not in FINAL:
        say(f"ending run {found.name} of {found.experiment} ...")
    try:
        grace = read_plan(found.path).timeouts.grace
    except DataError:
        grace = TimeoutConfig().grace  # a run whose plan is damaged has to end, too
    status = backend_of(found).cancel(found, now=now, timeout_seconds=2 * grace + _MARGIN_SECONDS)
    if output == "json":
        result_json({"run": found.name, "before": before, "status": status})
    elif before in FINAL:
        result(f"run {found.name} had {before} already")
    elif status == "lost":
        result(f"run {found.name} is lost; nothing of it is alive")
    else:
        result(f"run {found.name} {status}")
