"""`gkr nodes`: the machines of a cluster and what is on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gkr.options import clusters_option, output_option

if TYPE_CHECKING:
    from gkr.cluster.capacity import Node

_SHOWN = 100


@click.command(name="nodes")
@clusters_option
@click.option("--gpu", help="Only nodes with this GPU type.")
@click.option("--free", is_flag=True, help="Only nodes with a free GPU.")
@click.option("--broken", is_flag=True, help="Only nodes that take no new pods.")
@click.option("-a", "--all", "everything", is_flag=True, help=f"All of them, not only the first {_SHOWN}.")
@output_option()
def command(
    *, clusters: tuple[str, ...], gpu: str | None, free: bool, broken: bool, everything: bool, output: str
) -> int:
    """List nodes: machine, GPUs used and in all, place in the topology, state."""
    from dataclasses import asdict

    from gkr.cluster.asking import ask, chosen_clusters
    from gkr.cluster.asking_output import report_failures
    from gkr.cluster.explain_reading import read_cluster_nodes
    from gkr.output import result, result_json, say, table

    def wanted(node: Node) -> bool:
        matches = gpu is None or node.gpu == gpu
        return matches and (not free or node.free > 0) and (not broken or not node.usable)

    answers = ask(chosen_clusters(clusters), read_cluster_nodes)
    found = {name: [node for node in nodes if wanted(node)] for name, nodes in answers.found.items()}
    if output == "json":
        result_json({name: [asdict(node) for node in nodes] for name, nodes in found.items()})
        return report_failures(answers)
    rows = [_row(name, node) for name, nodes in found.items() for node in nodes]
    shown = rows if everything else rows[:_SHOWN]
    if shown:
        result(table(shown, header=["CLUSTER", "NODE", "MACHINE", "GPUS", "PODS", "PLACE", "STATE", "HELD BY"]))
    elif answers.found:
        say("no such node")
    if len(shown) < len(rows):
        say(f"{len(rows) - len(shown)} more; `gkr nodes --all` shows them, `--free` and `--broken` choose")
    return report_failures(answers)


def _row(cluster: str, node: Node) -> list[str]:
    from gkr.cluster.explain_objects import listed

    gpus = f"{node.used}/{node.gpus} {node.gpu}" if node.gpu else "-"
    held = listed([f"{who} {count}" for who, count in node.holders.items()])
    return [cluster, node.name, node.machine, gpus, str(node.pods), node.place or node.zone or "-", node.state, held]
