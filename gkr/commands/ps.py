"""`gkr ps`: runs and their state, here and in every cluster that was added."""

from __future__ import annotations

import click

from gkr.options import output_option

_SHOWN = 20


@click.command(name="ps")
@click.option("-a", "--all", "everything", is_flag=True, help=f"All runs, not only the newest {_SHOWN}.")
@click.option("--here", is_flag=True, help="Only runs with a folder here, as last seen; no cluster is asked.")
@output_option()
def command(*, everything: bool, here: bool, output: str) -> None:
    """List runs, newest first; also those that others launched on the clusters that were added."""
    from gkr.listing import list_everywhere
    from gkr.output import result, result_json, say, table
    from gkr.runs import runs_root

    listing = list_everywhere(ask=not here)
    for failed in listing.failed:
        say(f"warning: {failed}")
    rows = listing.rows if everything else listing.rows[:_SHOWN]
    if output == "json":
        result_json([row.fields() for row in rows])
        return
    if not rows:
        say(f"There are no runs in {runs_root()}. `gkr launch FILE` starts one.")
        return
    header = ["RUN", "EXPERIMENT", "WHERE", "STATUS", "TOOK", "AGE", "REASON"]
    result(table([row.cells() for row in rows], header=header))
    if len(listing.rows) > len(rows):
        say(f"{len(listing.rows) - len(rows)} older runs are not shown; `gkr ps --all` shows them.")
    for row in rows:
        if row.state.status == "lost":
            say(f"{row.run} is lost: {row.state.reason}. `gkr resume {row.run}` goes on from its checkpoints.")
