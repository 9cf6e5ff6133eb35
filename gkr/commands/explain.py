"""`gkr explain FIELD`: help for one field, from the same models that check the file."""

from __future__ import annotations

import re

import click
from click.shell_completion import CompletionItem

from gkr.options import output_option


def _complete_field(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from gkr.explain import field_paths  # imports pydantic: this one TAB may cost it

    del ctx, param
    return [CompletionItem(path) for path in field_paths() if path.startswith(incomplete)]


@click.command(name="explain")
@click.argument("field", required=False, shell_complete=_complete_field)
@output_option()
def command(*, field: str | None, output: str) -> None:
    """Explain FIELD of an experiment file, for example groups.resources.gpu.

    Without FIELD list the fields of a file.
    """
    from dataclasses import asdict

    from gkr.explain import explain, lines
    from gkr.output import result, result_json

    found = explain(re.sub(r"\[\d*\]", "", field or ""))
    if output == "json":
        result_json(asdict(found))
        return
    for line in lines(found):
        result(line)
