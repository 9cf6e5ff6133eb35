"""`gkr init [NAME]`: a commented experiment file to start from."""

from __future__ import annotations

import click

from gkr.options import output_option


@click.command(name="init")
@click.argument("name", default="my-experiment")
@output_option()
def command(*, name: str, output: str) -> None:
    """Write NAME.yaml, an experiment that runs on this machine as it stands. An existing file is never overwritten."""
    from gkr.output import result, result_json, say
    from gkr.template import write_template

    path = write_template(name)
    if output == "json":
        result_json({"file": f"{path}"})
        return
    result(f"{path}")
    say(f"look at it, then: gkr plan {path}; gkr launch {path}; every field: gkr explain")
