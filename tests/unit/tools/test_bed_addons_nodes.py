"""Fake nodes look like GKE's, and a second request changes only the difference."""

from __future__ import annotations

import pytest

from spec.errors import ConfigError
from spec.machines import machine
from tools.bed import fake_nodes

BLOCK, SUBBLOCK, HOST = (f"cloud.google.com/gce-topology-{level}" for level in ("block", "subblock", "host"))


def test_a_node_carries_labels_taint_and_size_of_its_machine() -> None:
    row = machine("a3-ultra")
    node = fake_nodes.node(row, 3, region="bed-a")
    labels = node["metadata"]["labels"]
    assert node["metadata"]["name"] == "gke-a3-ultra-3"
    assert row.labels.items() <= labels.items()
    assert labels["topology.kubernetes.io/zone"] == "bed-a-a"
    assert labels["kubernetes.io/hostname"] == "gke-a3-ultra-3"
    assert node["metadata"]["annotations"] == {"kwok.x-k8s.io/node": "fake"}
    assert node["spec"]["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    capacity = node["status"]["capacity"]
    assert capacity == node["status"]["allocatable"]
    assert (capacity["cpu"], capacity["nvidia.com/gpu"]) == ("220", "8")
    assert capacity["memory"] == str(2800 * 2**30)


def test_a_node_without_gpus_has_neither_taint_nor_place_nor_gpus() -> None:
    node = fake_nodes.node(machine("n2-standard-8"), 0, region="bed-a")
    assert node["spec"]["taints"] == []
    assert "nvidia.com/gpu" not in node["status"]["capacity"]
    assert not [label for label in node["metadata"]["labels"] if label.startswith("cloud.google.com/gce")]


def test_sixteen_nodes_share_a_subblock_and_four_subblocks_a_block() -> None:
    nodes = [fake_nodes.node(machine("a3-ultra"), index, region="r")["metadata"]["labels"] for index in range(130)]
    assert len({node[HOST] for node in nodes}) == 130
    sizes = [sum(node[SUBBLOCK] == one for node in nodes) for one in dict.fromkeys(node[SUBBLOCK] for node in nodes)]
    assert sizes == [16] * 8 + [2]
    assert [sum(node[BLOCK] == one for node in nodes) for one in dict.fromkeys(node[BLOCK] for node in nodes)] == [
        64,
        64,
        2,
    ]
    assert all(node[SUBBLOCK].startswith(node[BLOCK]) for node in nodes)


def test_machines_share_no_block() -> None:
    places = [fake_nodes.node(machine(name), 0, region="r")["metadata"]["labels"][BLOCK] for name in ("a3-mega", "a4")]
    assert places[0] != places[1]


def test_only_the_difference_is_created_and_removed() -> None:
    present = ["gke-a3-mega-0", "gke-a3-ultra-0", "gke-a3-ultra-1", "gke-a3-ultra-2"]
    todo = fake_nodes.change({"a3-ultra": 2, "a4": 1}, present=present, region="r")
    assert [node["metadata"]["name"] for node in todo.create] == ["gke-a4-0"]
    assert todo.remove == ["gke-a3-mega-0", "gke-a3-ultra-2"]
    assert fake_nodes.change({"a3-ultra": 1}, present=["gke-a3-ultra-0"], region="r") == fake_nodes.Change([], [])


def test_a_request_is_parsed() -> None:
    assert fake_nodes.parse("a3-ultra=64, a3-mega=32") == {"a3-ultra": 64, "a3-mega": 32}
    assert fake_nodes.parse("") == {}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a3-ultra", "not MACHINE=COUNT"),
        ("a3-ultra=0", "not MACHINE=COUNT"),
        ("a3-ultra=-1", "not MACHINE=COUNT"),
        ("a3-ultr=1", '"a3-ultr" is not in the catalogue'),
        ("local-cpu=1", '"local-cpu" is not in the catalogue'),
        ("a4=1,a4=2", "a4 is named twice"),
        ("a4=4000,a3-mega=1001", "5001 fake nodes are more than a bed holds"),
    ],
)
def test_a_wrong_request_is_refused_with_what_was_wrong(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        fake_nodes.parse(text)
    assert caught.value.hint
