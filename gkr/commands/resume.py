"""`gkr resume RUN`: a new supervisor for a run that lost its own."""

from __future__ import annotations

import click

from gkr.options import output_option, run_argument


@click.command(name="resume")
@run_argument
@click.option("-d", "--detach", is_flag=True, help="Do not watch.")
@output_option()
def command(*, run: str | None, detach: bool, output: str) -> int:
    """Go on with a lost run (its supervisor was killed, the machine restarted) from its checkpoints."""
    from gkr.attend import attend
    from gkr.backend import backend_of, find_run
    from gkr.output import result, result_json
    from spec.errors import EXIT_OK

    found = find_run(run)
    backend_of(found).resume(found)
    if not detach:
        return attend(found, output=output)
    if output == "json":
        result_json({"run": found.name, "path": f"{found.path}"})
    else:
        result(found.name)
    return EXIT_OK
