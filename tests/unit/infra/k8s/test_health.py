"""Alerts, collection and the health controller's rights."""

from __future__ import annotations

from infra.components.ops.health import alerts, controller_objects, monitoring_objects, xid_objects
from manifests.names import METRICS_PORT_NAME
from spec.stack_platform import Health


def verbs(health: Health, resource: str) -> list[str]:
    [role] = [one for one in controller_objects(health) if one["kind"] == "ClusterRole"]
    [rule] = [one for one in role["rules"] if one["resources"] == [resource]]
    return rule["verbs"]


def test_the_controller_cordons_only_if_it_may() -> None:
    assert "patch" in verbs(Health(cordon=True), "nodes")
    assert verbs(Health(cordon=False), "nodes") == ["get", "list", "watch"]


def test_the_controller_never_deletes_and_its_binding_names_its_own_account() -> None:
    account, role, binding = controller_objects(Health())
    granted = {verb for rule in role["rules"] for verb in rule["verbs"]}
    assert granted.isdisjoint({"delete", "deletecollection", "*", "impersonate", "escalate", "bind"})
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": account["metadata"]["namespace"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_every_configured_error_is_alerted_on_and_told_to_the_device_plugin() -> None:
    health = Health(critical_xids=[79, 48, 79])
    [config] = xid_objects(health)
    assert config["data"] == {"HealthCriticalXid": "48,79"}
    found = {one.name: one.query for one in alerts(health, cluster="us-east5")}
    assert found["xid"].count("==") == 2
    assert "XidCriticalError" in found["condition"]


def test_alerts_are_about_one_cluster() -> None:
    for one in alerts(Health(), cluster="us-east5"):
        metrics = one.query.count("DCGM_") + one.query.count("kube_")
        assert one.query.count('cluster="us-east5"') == metrics > 0


def test_without_watching_xids_only_metrics_are_left() -> None:
    names = {one.name for one in alerts(Health(watch_xid=False), cluster="c")}
    assert names == {"ecc", "idle", "nvlink", "temperature"}


def test_limits_come_from_the_configuration() -> None:
    health = Health(max_temperature_celsius=70).model_copy(update={"alert_after": 300.0})
    found = {one.name: one for one in alerts(health, cluster="c")}
    assert found["temperature"].query.endswith("> 70")
    assert found["xid"].duration_seconds == 300


def test_metrics_of_ray_and_of_replicas_carry_the_experiment() -> None:
    found = {one["metadata"]["name"]: one["spec"] for one in monitoring_objects()}
    assert found.keys() == {"gkr-ray", "gkr-services"}
    for one in found.values():
        assert {"from": "gkr/experiment", "to": "experiment"} in one["targetLabels"]["fromPod"]
    replicas = found["gkr-services"]
    assert [one["port"] for one in replicas["endpoints"]] == [METRICS_PORT_NAME]
    assert replicas["selector"] == {"matchLabels": {"gkr/role": "service"}}
