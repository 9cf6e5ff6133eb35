"""`gkr clusters`: which clusters gkr knows, and which one it uses where none is named."""

from __future__ import annotations

from pathlib import Path

import click

from gkr.options import complete_cluster, output_option


@click.group(name="clusters", invoke_without_command=True)
@output_option()
@click.pass_context
def command(ctx: click.Context, *, output: str) -> None:
    """The clusters that were added; alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_, output=output, check=False)


@command.command(name="add", short_help="Remember a cluster, and read its facts.")
@click.argument("name")
@click.option("--kubeconfig", metavar="FILE", help="Default: KUBECONFIG, else the one in the home folder.")
@click.option("--context", metavar="NAME", help="Default: the current context, from now on by its name.")
@click.option("--namespace", metavar="NAME", help="Where runs go. Default: the context's, else those in the facts.")
@click.option(
    "--facts",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="Take the facts from a file instead.",
)
@click.option("--replace", is_flag=True, help="Replace an entry of this name.")
@output_option()
def add(
    *,
    name: str,
    kubeconfig: str | None,
    context: str | None,
    namespace: str | None,
    facts: Path | None,
    replace: bool,
    output: str,
) -> None:
    """Remember a cluster as NAME and read the facts that its platform published."""
    from gkr.cluster.joining import join
    from gkr.output import result, result_json

    entry, found = join(name, kubeconfig=kubeconfig, context=context, namespace=namespace, facts=facts, replace=replace)
    if output == "json":
        from dataclasses import asdict

        result_json({**asdict(entry), "facts": found.model_dump(mode="json")})
        return
    gpus = ", ".join(found.gpu_types()) or "no GPUs"
    result(f"cluster {name}: {found.region}, {gpus}, queues {', '.join(found.queues) or 'none'}")
    result(f"  context {entry.context} of {entry.kubeconfig}, namespaces {', '.join(found.namespaces)}")


@command.command(name="list")
@click.option("--check", is_flag=True, help="Ask each whether it answers.")
@output_option()
def list_(*, output: str, check: bool) -> None:
    """List the clusters. A star marks the default."""
    from gkr.cluster.joining import describe_all
    from gkr.output import result, result_json, say, table

    rows = describe_all(check=check)
    if output == "json":
        result_json(rows)
        return
    if not rows:
        say("No cluster was added; runs go to this machine. `gkr clusters add NAME` adds the current context.")
        return
    cells = [
        [
            "*" if row["default"] else "",
            row["name"],
            row["region"],
            row["gpus"] or "-",
            row["context"],
            row["namespace"],
            row["state"],
        ]
        for row in rows
    ]
    result(table(cells, header=["", "CLUSTER", "REGION", "GPUS", "CONTEXT", "NAMESPACES", "STATE"]))


@command.command(name="use", short_help="Launch on a cluster where nothing else says where.")
@click.argument("name", shell_complete=complete_cluster)
@output_option()
def use(*, name: str, output: str) -> None:
    """Launch on NAME where neither file nor command line says where; `local` means this machine."""
    from gkr.cluster.registry import use_entry
    from gkr.output import result, result_json

    registry = use_entry("" if name == "local" else name)
    if output == "json":
        result_json({"default": registry.default or "local"})
    else:
        result(f"using {registry.default or 'this machine'}")


@command.command(name="remove")
@click.argument("name", shell_complete=complete_cluster)
@output_option()
def remove(*, name: str, output: str) -> None:
    """Forget NAME. Its runs go on, and those with a folder here can still be cancelled."""
    from gkr.cluster.registry import remove_entry
    from gkr.output import result, result_json

    remove_entry(name)
    if output == "json":
        result_json({"removed": name})
    else:
        result(f"cluster {name} is forgotten")
