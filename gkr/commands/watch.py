"""`gkr watch RUN`: come back to a run."""

from __future__ import annotations

import click

from gkr.options import output_option, run_argument


@click.command(name="watch")
@run_argument
@output_option()
def command(*, run: str | None, output: str) -> int:
    """Watch a run until it ends; Ctrl-C only stops watching. The exit code is the run's fate."""
    from gkr.attend import attend
    from gkr.backend import find_run

    return attend(find_run(run), output=output)
