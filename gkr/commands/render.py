"""`gkr render FILE`: the Kubernetes objects that launching the file would create."""

from __future__ import annotations

from pathlib import Path

import click

from gkr.options import cluster_option, complete_cluster, file_argument, output_option, set_option


@click.command(name="render")
@file_argument
@set_option
@cluster_option
@click.option(
    "--facts",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="Place on the clusters described in this file, whether or not they were added.",
)
@click.option("--only", metavar="CLUSTER", shell_complete=complete_cluster, help="Only the objects of this cluster.")
@output_option("yaml", "json")
def command(
    *,
    file: Path,
    overrides: tuple[str, ...],
    clusters: tuple[str, ...],
    facts: Path | None,
    only: str | None,
    output: str,
) -> None:
    """Print the objects in the order in which they are applied: `gkr render FILE --cluster C | kubectl apply -f -`.

    Nothing else goes to stdout. Values taken from the caller's environment and the packed code are not in it; `gkr
    launch` adds them.
    """
    from gkr.loading import load_plan
    from gkr.output import result, say
    from gkr.rendering import as_json, as_yaml, rendered

    plan = load_plan(file, overrides=overrides, facts=facts, clusters=clusters)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    objects, remarks = rendered(plan, only=only)
    for remark in remarks:
        say(remark)
    result(as_json(objects) if output == "json" else as_yaml(objects))
