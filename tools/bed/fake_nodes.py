"""Fake nodes of catalogue machines, as GKE would present them; KWOK keeps them alive.

Labels, taint, capacity and the places in the topology are those of the real machine, so placement, quotas and their
explanations meet what they meet on GKE. Pods on these nodes run nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from spec.errors import ConfigError
from spec.machines import CATALOGUE, Machine, machine
from spec.problems import did_you_mean
from tools.bed.kueue import GPU_TAINT, capacity
from tools.bed.layout import Bed
from tools.bed.run import kubectl

MANAGED = "kwok.x-k8s.io/node"
"""Annotation by which KWOK knows its nodes."""
MACHINE_LABEL = "gkr/fake-machine"
MOST_NODES = 5000
"""Of one bed: their addresses come from one /16, and one machine serves them all."""
SUBBLOCK_NODES = 16
BLOCK_SUBBLOCKS = 4
PODS = "110"
CHUNK = 100
WRITERS = 4
APPLY_SECONDS = 180.0

Item = TypeVar("Item")


@dataclass(frozen=True)
class Change:
    """What has to happen so that a bed has the fake nodes that are wanted."""

    create: list[dict[str, Any]]
    remove: list[str]


def name(one: Machine, index: int) -> str:
    """Name of a fake node; its number decides its place in the topology."""
    return f"gke-{one.name}-{index}"


def parse(text: str) -> dict[str, int]:
    """`a3-ultra=64,a3-mega=32` -> machine and count; an empty text is no fake nodes."""
    wanted: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        row, _, count = part.partition("=")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(f'"{part}" is not MACHINE=COUNT', hint="write for example FAKE=a3-ultra=64,a3-mega=32")
        if row in wanted:
            raise ConfigError(f"{row} is named twice in {text}", hint="one count for each machine")
        wanted[_known(row).name] = int(count)
    if sum(wanted.values()) > MOST_NODES:
        raise ConfigError(
            f"{sum(wanted.values())} fake nodes are more than a bed holds ({MOST_NODES})", hint="ask for fewer"
        )
    return wanted


def _known(row: str) -> Machine:
    names = [one.name for one in CATALOGUE if one.allocatable_cpu >= 1]
    if row not in names:
        raise ConfigError(f'machine "{row}" is not in the catalogue', hint=did_you_mean(row, names, noun="machines"))
    return machine(row)


def node(one: Machine, index: int, *, region: str) -> dict[str, Any]:
    """A node as GKE's would look, ready to be created with its status."""
    own = name(one, index)
    amounts = {key: value for key, value in capacity(one).items() if value != "0"} | {"pods": PODS}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": own,
            "annotations": {MANAGED: "fake"},
            "labels": {
                **one.labels,
                **_place(one, index),
                MACHINE_LABEL: one.name,
                "cloud.google.com/gke-nodepool": one.name,
                "kubernetes.io/arch": "amd64",
                "kubernetes.io/hostname": own,
                "kubernetes.io/os": "linux",
                "topology.kubernetes.io/region": region,
                "topology.kubernetes.io/zone": f"{region}-a",
            },
        },
        "spec": {"taints": [GPU_TAINT] if one.gpus else []},
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def _place(one: Machine, index: int) -> dict[str, str]:
    """Where the node hangs in the fabric: 16 nodes share a sub-block, 4 sub-blocks a block; machines share neither."""
    if not one.gpus:
        return {}
    subblock = index // SUBBLOCK_NODES
    prefix = "cloud.google.com/gce-topology"
    return {
        f"{prefix}-block": f"{one.name}-b{subblock // BLOCK_SUBBLOCKS}",
        f"{prefix}-subblock": f"{one.name}-b{subblock // BLOCK_SUBBLOCKS}-s{subblock % BLOCK_SUBBLOCKS}",
        f"{prefix}-host": f"{one.name}-h{index}",
    }


def change(wanted: Mapping[str, int], *, present: Sequence[str], region: str) -> Change:
    """What to create and what to remove; nodes that are right stay as they are, with the pods on them."""
    right = {
        name(machine(row), index): (machine(row), index) for row, count in wanted.items() for index in range(count)
    }
    missing = [node(one, index, region=region) for own, (one, index) in right.items() if own not in set(present)]
    return Change(create=missing, remove=[own for own in present if own not in right])


def present(bed: Bed) -> list[str]:
    """Names of all fake nodes that the cluster has."""
    return kubectl(bed, "get", "nodes", "-l", MACHINE_LABEL, "-o", "jsonpath={.items[*].metadata.name}").split()


def provide(bed: Bed, *, wanted: Mapping[str, int]) -> Change:
    """Create and remove fake nodes until the cluster has the wanted ones.

    Several writers, because each creates the nodes of its list one after another.
    """
    todo = change(wanted, present=present(bed), region=bed.region)
    with ThreadPoolExecutor(max_workers=WRITERS) as writers:
        removals = [writers.submit(_remove, bed, names) for names in _chunks(todo.remove)]
        creations = [writers.submit(_create, bed, nodes) for nodes in _chunks(todo.create)]
        for one in (*removals, *creations):
            one.result()
    return todo


def _chunks(items: Sequence[Item]) -> list[Sequence[Item]]:
    return [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)]


def _create(bed: Bed, nodes: Sequence[dict[str, Any]]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(nodes)})
    kubectl(bed, "create", "--validate=false", "-f", "-", stdin=text, deadline_seconds=APPLY_SECONDS)


def _remove(bed: Bed, names: Sequence[str]) -> None:
    kubectl(bed, "delete", "node", "--wait=false", "--ignore-not-found", *names, deadline_seconds=APPLY_SECONDS)
