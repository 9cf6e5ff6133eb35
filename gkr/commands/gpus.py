"""`gkr gpus`: how many GPUs there are, free, used and broken, and who holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gkr.options import clusters_option, output_option

if TYPE_CHECKING:
    from gkr.cluster.capacity import GpuType


@click.command(name="gpus")
@clusters_option
@output_option()
def command(*, clusters: tuple[str, ...], output: str) -> int:
    """Show the GPUs of every cluster by type.

    NODE: the most that are free on one node. BLOCK: the most that are free within one topology sub-block.
    """
    from gkr.cluster.asking import ask, chosen_clusters
    from gkr.cluster.asking_output import report_failures
    from gkr.cluster.capacity import gpu_types
    from gkr.cluster.explain_reading import read_cluster_nodes
    from gkr.output import result, result_json, say, table

    answers = ask(chosen_clusters(clusters), lambda connection: gpu_types(read_cluster_nodes(connection)))
    if output == "json":
        result_json({name: [_fields(one) for one in types] for name, types in answers.found.items()})
        return report_failures(answers)
    rows = [_row(name, one) for name, types in answers.found.items() for one in types]
    header = ["CLUSTER", "GPU", "NODES", "TOTAL", "FREE", "USED", "BROKEN", "NODE", "BLOCK", "HELD BY"]
    if rows:
        result(table(rows, header=header))
    elif answers.found:
        say(f"no GPUs in {', '.join(answers.found)}")
    for name, types in answers.found.items():
        for one in types:
            for node, state in list(one.broken_nodes.items())[:_SHOWN]:
                say(f"{name}: {node} is {state}")
    return report_failures(answers)


_SHOWN = 5


def _row(cluster: str, one: GpuType) -> list[str]:
    from gkr.cluster.explain_objects import listed

    held = listed([f"{who} {count}" for who, count in one.holders.items()])
    block = f"{one.largest_in_subblock} in {one.subblock}" if one.subblock else "-"
    numbers = [one.nodes, one.total, one.free, one.used, one.broken, one.largest_on_node]
    return [cluster, one.gpu, *map(str, numbers), block, held]


def _fields(one: GpuType) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(one)
