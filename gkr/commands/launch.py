"""`gkr launch FILE`: start an experiment and watch it."""

from __future__ import annotations

from pathlib import Path

import click

from gkr.options import file_argument, output_option, set_option


@click.command(name="launch")
@file_argument
@set_option
@click.option("-d", "--detach", is_flag=True, help="Start it, print the run's id, and do not watch.")
@click.option("--dry-run", is_flag=True, help="Show the plan and start nothing.")
@output_option()
def command(*, file: Path, overrides: tuple[str, ...], detach: bool, dry_run: bool, output: str) -> int:
    """Start the experiment in FILE and watch it.

    Ctrl-C stops watching, not the run; the exit code is the run's fate.
    """
    from gkr.attend import attend
    from gkr.loading import load_plan
    from gkr.local.capabilities import refuse_what_is_not_carried_out
    from gkr.local.environment import require_roles
    from gkr.local.launcher import create_run, start_supervisor
    from gkr.output import result, result_json, say
    from gkr.planning import show_plan
    from gkr.runs import runs_root
    from spec.errors import EXIT_OK

    plan = load_plan(file, overrides=overrides)
    if dry_run:
        show_plan(plan, output=output)
        return EXIT_OK
    refuse_what_is_not_carried_out(plan)
    require_roles()
    for warning in plan.warnings:
        say(f"warning: {warning}")
    run = create_run(plan, root=runs_root())
    pid = start_supervisor(run)
    say(f"run {run.name} of {run.experiment} in {run.path}")
    if not detach:
        return attend(run, output=output)
    if output == "json":
        result_json({"run": run.name, "experiment": run.experiment, "path": f"{run.path}", "supervisor": pid})
    else:
        result(run.name)
        say(f"watch it with `gkr watch {run.name}`, end it with `gkr cancel {run.name}`")
    return EXIT_OK
