"""Networks of a machine's fabric: count, order and names, and pods that match them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from manifests.fabric import pod_fabric
from spec.machines import CATALOGUE, Machine, machine
from spec.stack_fabric import FabricNetwork, fabric_networks, fabric_subnets, network_faults, vpcs
from spec.stack_pods import INTERFACES, interface_annotations, pod_faults
from spec.stack_values import network_of

BUILT = [one for one in CATALOGUE if one.extra_networks and not one.unsupported]
ULTRA, MEGA = machine("a3-ultra"), machine("a3-mega")


def _named(name: str) -> FabricNetwork:
    return FabricNetwork(name, "NetDevice", own_vpc=True)


def test_network_count_and_order_per_catalogue_row() -> None:
    assert [one.name for one in fabric_networks(MEGA)] == [f"vpc{index}" for index in range(1, 9)]
    assert [one.name for one in fabric_networks(ULTRA)] == ["gvnic-1", *(f"rdma-{index}" for index in range(8))]
    assert [one.mode for one in fabric_networks(ULTRA)] == ["NetDevice", *["RDMA"] * 8]
    for row in CATALOGUE:
        if not row.unsupported:
            assert len(fabric_networks(row)) == row.extra_networks, row.name


@pytest.mark.parametrize("row", BUILT, ids=lambda row: row.name)
def test_the_rows_own_networks_have_no_fault(row: Machine) -> None:
    assert network_faults(row, networks=fabric_networks(row)) == []


@pytest.mark.parametrize("row", BUILT, ids=lambda row: row.name)
def test_a_missing_network_is_a_fault(row: Machine) -> None:
    faults = network_faults(row, networks=fabric_networks(row)[:-1])
    assert ["fall back to TCP" in one for one in faults] == [True]


@pytest.mark.parametrize("row", BUILT, ids=lambda row: row.name)
def test_another_order_is_a_fault(row: Machine) -> None:
    networks = fabric_networks(row)
    faults = network_faults(row, networks=(*networks[1:], networks[0]))
    assert ["each other's network" in one for one in faults] == [True]


def test_no_gvnic_on_mega() -> None:
    ninth = [_named("gvnic-1"), *fabric_networks(MEGA)]
    assert any("takes a GPU NIC's slot" in one for one in network_faults(MEGA, networks=ninth))
    instead = [_named("gvnic-1"), *fabric_networks(MEGA)[1:]]
    assert any("takes a GPU NIC's slot" in one for one in network_faults(MEGA, networks=instead))


def test_network_object_names_have_at_most_41_characters() -> None:
    for row in CATALOGUE:
        assert all(len(one.name) <= 41 for one in fabric_networks(row))
    longer = [_named("v" * 42), *fabric_networks(MEGA)[1:]]
    assert any("has 42 characters" in one for one in network_faults(MEGA, networks=longer))


def test_networks_of_the_projects_quota() -> None:
    taken = {row.fabric: vpcs(row) for row in BUILT}
    assert taken == {"tcpxo": 8, "rdma": 2, "tcpx": 4}
    assert vpcs(machine("n2-standard-8")) == 0


@pytest.mark.parametrize("row", BUILT, ids=lambda row: row.name)
def test_subnets_are_apart_and_inside_the_fabrics_range(row: Machine) -> None:
    subnets = fabric_subnets(row, cidr="192.168.0.0/16")
    assert list(subnets) == [one.name for one in fabric_networks(row)]
    ranges = [network_of(one) for one in subnets.values()]
    assert all(one.subnet_of(network_of("192.168.0.0/16")) and one.prefixlen == 20 for one in ranges)
    assert not any(one.overlaps(two) for one, two in combinations(ranges, 2))


def _pod(row: Machine) -> dict[str, Any]:
    return {
        "metadata": {"annotations": dict(pod_fabric(row, gpus=row.gpus).annotations)},
        "spec": {"containers": [{"name": "ray"}]},
    }


@pytest.mark.parametrize("row", [ULTRA, MEGA, machine("a4")], ids=lambda row: row.name)
def test_pod_annotations_list_exactly_the_clusters_network_names(row: Machine) -> None:
    """The pods that `gkr` makes and the networks that the platform stack makes."""
    pod = _pod(row)
    assert pod_faults(pod, row=row) == []
    assert interface_annotations(row).items() <= pod["metadata"]["annotations"].items()
    lists = json.loads(pod["metadata"]["annotations"][INTERFACES])
    for wrong in (lists[:-1], [*lists, lists[-1]], [lists[0], *reversed(lists[1:])], []):
        pod["metadata"]["annotations"][INTERFACES] = json.dumps(wrong)
        assert ["the networks of" in one for one in pod_faults(pod, row=row)] == [True]


def test_an_annotation_that_is_no_list_is_a_fault() -> None:
    pod = _pod(ULTRA)
    for text in ("{", "3", '["eth0"]'):
        pod["metadata"]["annotations"][INTERFACES] = text
        assert pod_faults(pod, row=ULTRA) != []


def test_the_pods_default_interface_stays_the_gateway() -> None:
    pod = _pod(ULTRA)
    pod["metadata"]["annotations"]["networking.gke.io/default-interface"] = "eth1"
    assert ["could not reach the cluster" in one for one in pod_faults(pod, row=ULTRA)] == [True]


def test_ray_container_first() -> None:
    pod = _pod(ULTRA)
    pod["spec"]["containers"].insert(0, {"name": "sidecar"})
    assert ["Ray's container is not the first" in one for one in pod_faults(pod, row=ULTRA)] == [True]
    pod["spec"]["containers"] = []
    assert pod_faults(pod, row=ULTRA) != []


def test_host_network_is_a_fault() -> None:
    pod = _pod(MEGA)
    pod["spec"]["hostNetwork"] = True
    assert ["hostNetwork" in one for one in pod_faults(pod, row=MEGA)] == [True]


def test_a_row_with_another_fabric_has_other_networks() -> None:
    """Adding a machine type is its row: everything here derives from it."""
    row = replace(ULTRA, name="new", fabric="tcpxo", extra_networks=8)
    assert fabric_networks(row) == fabric_networks(MEGA)
