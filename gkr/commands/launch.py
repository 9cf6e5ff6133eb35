"""`gkr launch FILE`: start an experiment and watch it."""

from __future__ import annotations

from pathlib import Path

import click

from gkr.options import cluster_option, file_argument, output_option, set_option


class _Launch(click.Command):
    """`--dry-run` alone means the client's; click would take the file for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        plain = ["--dry-run=client" if one == "--dry-run" else one for one in args[:end]]
        return super().parse_args(ctx, [*plain, *args[end:]])


@click.command(name="launch", cls=_Launch)
@file_argument
@set_option
@cluster_option
@click.option("-d", "--detach", is_flag=True, help="Start it, print the run's id, and do not watch.")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    help="Show the plan and start nothing; `=server` also asks the clusters whether they would take it.",
)
@output_option()
def command(
    *,
    file: Path,
    overrides: tuple[str, ...],
    clusters: tuple[str, ...],
    detach: bool,
    dry_run: str | None,
    output: str,
) -> int:
    """Start the experiment in FILE and watch it.

    Ctrl-C stops watching, not the run; the exit code is the run's fate.
    """
    from gkr.attend import attend
    from gkr.backend import backend_for
    from gkr.loading import load_current_plan, load_plan
    from gkr.output import result, result_json, say
    from gkr.planning import show_plan
    from gkr.runs import runs_root
    from spec.errors import EXIT_OK

    load = load_plan if dry_run == "client" else load_current_plan
    plan = load(file, overrides=overrides, clusters=clusters)
    if dry_run:
        show_plan(plan, output=output)
        if dry_run == "server":
            backend_for(plan).check(plan, say=say)
        return EXIT_OK
    for warning in plan.warnings:
        say(f"warning: {warning}")
    run = backend_for(plan).launch(plan, root=runs_root(), say=say)
    say(f"run {run.name} of {run.experiment} in {run.path}")
    if not detach:
        return attend(run, output=output)
    if output == "json":
        result_json({"run": run.name, "experiment": run.experiment, "path": f"{run.path}"})
    else:
        result(run.name)
        say(f"watch it with `gkr watch {run.name}`, end it with `gkr cancel {run.name}`")
    return EXIT_OK
