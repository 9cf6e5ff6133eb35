"""`gkr plan FILE`: what launching the file would do."""

from __future__ import annotations

from pathlib import Path

import click

from gkr.options import cluster_option, file_argument, output_option, set_option


@click.command(name="plan")
@file_argument
@set_option
@cluster_option
@click.option(
    "--facts",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="Place on the clusters described in this file instead of on this machine.",
)
@output_option("json", "yaml")
def command(
    *, file: Path, overrides: tuple[str, ...], clusters: tuple[str, ...], facts: Path | None, output: str
) -> None:
    """Show placement, effective values with their origins, and warnings. Starts and writes nothing."""
    from gkr.loading import load_plan
    from gkr.planning import show_plan

    show_plan(load_plan(file, overrides=overrides, facts=facts, clusters=clusters), output=output)
