"""The Google Cloud double against what the SDK and the table of fields say. No engine here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pulumi_gcp.compute import NetworkArgs
from pulumi_gcp.container import ClusterArgs, NodePoolArgs

from spec.machines import machine
from tests.builders.gcp_double import answers, on_bed, schema
from tests.builders.gcp_double.cloud import Cloud
from tests.builders.gcp_double.differences import differences
from tests.builders.previews import ultra_networks, ultra_pool

POOL = "gcp:container/nodePool:NodePool"


def changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, bool]:
    return {one.path: one.forces for one in differences(POOL, old=old, new=new)}


def test_inputs_that_the_sdk_has_are_taken() -> None:
    assert schema.faults(ultra_pool(), of=NodePoolArgs) == []


def test_a_misspelt_key_deep_inside_is_named_with_its_place() -> None:
    pool = ultra_pool()
    pool["nodeConfig"]["guestAccelerators"][0]["gpuDriverInstalationConfig"] = {"gpuDriverVersion": "LATEST"}
    found = dict(schema.faults(pool, of=NodePoolArgs))
    assert list(found) == ["nodeConfig.guestAccelerators[0].gpuDriverInstalationConfig"]
    assert "gpuDriverInstallationConfig" in next(iter(found.values()))


def test_a_missing_key_is_named() -> None:
    pool = ultra_pool()
    del pool["cluster"]
    del pool["nodeConfig"]["taints"][0]["effect"]
    assert dict(schema.faults(pool, of=NodePoolArgs)) == {
        "cluster": "is required",
        "nodeConfig.taints[0].effect": "is required",
    }


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("mtu", "8896", "takes int"),
        ("mtu", 8896.5, "takes int"),
        ("autoCreateSubnetworks", "false", "takes bool"),
        ("name", ["a"], "takes str"),
        ("params", [], "takes fields"),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: Any, reason: str) -> None:
    found = schema.faults({key: value}, of=NetworkArgs)
    assert [path for path, _ in found] == [key]
    assert reason in found[0][1]


def test_values_that_are_known_later_and_numbers_of_the_wire_are_taken() -> None:
    assert schema.faults({"mtu": schema.UNKNOWN, "params": schema.UNKNOWN}, of=NetworkArgs) == []
    assert schema.faults({"mtu": 8896.0}, of=NetworkArgs) == []


def test_every_type_that_an_id_form_is_for_is_one_of_the_sdk() -> None:
    for token in answers._IDS:
        known = schema.types(schema.arguments(token))
        assert known, token
    assert schema.arguments(answers.CLUSTER) is ClusterArgs


def test_a_type_that_nobody_has_is_refused() -> None:
    with pytest.raises(schema.SchemaError, match="the SDK has no gcp:container/nodePol:NodePol"):
        schema.arguments("gcp:container/nodePol:NodePol")


def test_a_change_is_found_where_it_is_and_forces_what_the_provider_forces() -> None:
    assert changed(ultra_pool(), ultra_pool()) == {}
    assert changed(ultra_pool(), ultra_pool(nodes=300)) == {"nodeCount": False}
    driver = "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig.gpuDriverVersion"
    assert changed(ultra_pool(), ultra_pool(driver="DEFAULT")) == {driver: True}


def test_another_order_of_networks_is_a_change_and_another_order_of_scopes_of_a_set_is_none() -> None:
    turned = ultra_pool()
    turned["networkConfig"]["additionalNodeNetworkConfigs"] = ultra_networks()[::-1]
    assert set(changed(ultra_pool(), turned).values()) == {True}
    one, other = {"nodeConfig": {"tags": ["a", "b"]}}, {"nodeConfig": {"tags": ["b", "a"]}}
    assert changed(one, other) == {}


def test_a_field_that_comes_or_goes_is_told_apart() -> None:
    spot = {**ultra_pool(), "nodeConfig": {**ultra_pool()["nodeConfig"], "spot": True}}
    kinds = [(one.path, one.kind) for one in differences(POOL, old=ultra_pool(), new=spot)]
    assert kinds == [("nodeConfig.spot", "add")]
    assert [one.kind for one in differences(POOL, old=spot, new=ultra_pool())] == ["delete"]


def test_answers_are_the_same_for_the_same_inputs() -> None:
    inputs = {"project": "example", "region": "us-east5", "name": "nat-0"}
    kind = "gcp:compute/address:Address"
    identity = answers.identity(kind, inputs, urn="urn")
    assert identity == "projects/example/regions/us-east5/addresses/nat-0"
    assert answers.outputs(kind, inputs, identity=identity) == answers.outputs(kind, inputs, identity=identity)
    number = answers.project_number("example")
    assert number == answers.project_number("example")
    assert len(number) == 12
    assert answers.looked_up("gcp:compute/getImage:getImage", {}) is None
    project = {"project": "example-gkr-prod"}
    agent = answers.looked_up("gcp:storage/getProjectServiceAccount:getProjectServiceAccount", project)
    assert agent is not None
    assert agent["member"].startswith(f"serviceAccount:service-{answers.project_number('example-gkr-prod')}@")


def test_the_cloud_remembers_changes_and_forgets(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path)
    assert cloud.read(POOL, "a") is None
    cloud.write(POOL, "a", {"nodeCount": 1})
    cloud.write(POOL, "a", {"nodeCount": 2})
    assert cloud.read(POOL, "a") == {"nodeCount": 2}
    assert cloud.things() == [(POOL, "a")]
    cloud.remove(POOL, "a")
    assert cloud.things() == []
    cloud.set_faults(stock_out=["a"])
    assert cloud.stocked_out("a")
    assert not cloud.stocked_out("b")


def test_nodes_of_a_pool_are_as_gke_would_make_them() -> None:
    row = machine("a3-ultra")
    pool = ultra_pool(nodes=2)
    pool["nodeConfig"]["labels"] = {"team": "research"}
    nodes = on_bed.pool_nodes(pool, row, region="bed-a")
    assert [one["metadata"]["name"] for one in nodes] == ["gke-ultra-1-0", "gke-ultra-1-1"]
    labels = nodes[0]["metadata"]["labels"]
    assert labels["cloud.google.com/gke-nodepool"] == "ultra-1"
    assert labels["cloud.google.com/gke-accelerator"] == "nvidia-h200-141gb"
    assert labels["cloud.google.com/reservation-name"] == "ultra-east5"
    assert labels["topology.kubernetes.io/zone"] == "us-east5-a"
    assert labels["team"] == "research"
    assert nodes[0]["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert nodes[0]["spec"]["taints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
