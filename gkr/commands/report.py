"""`gkr report RUN`: one self-contained page."""

from __future__ import annotations

import click

from gkr.options import output_option, run_argument


@click.command(name="report")
@run_argument
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
@output_option()
def command(*, run: str | None, show: bool, output: str) -> None:
    """Build the report of a run, also of one that is still going, and print its path.

    Of a run on clusters the logs and pictures are fetched as well.
    """
    from gkr.backend import find_run, refresh
    from gkr.conclusion import conclude
    from gkr.output import result, result_json, say

    found = find_run(run)
    refresh(found, everything=True)
    path = conclude(found.path)
    if output == "json":
        result_json({"run": found.name, "report": f"{path}"})
    else:
        result(f"{path}")
    if show:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            say("no browser could be opened; open the page yourself")
