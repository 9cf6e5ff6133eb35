"""Alerts, collection and the health controller's rights."""

from __future__ import annotations

import re

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


def test_every_configured_error_is_told_to_the_device_plugin_and_alerted_on_where_it_is_collected() -> None:
    health = Health(critical_xids=[79, 48, 79], own_exporter=True)
    [config] = xid_objects(health)
    assert config["data"] == {"HealthCriticalXid": "48,79"}
    found = {one.name: one.query for one in alerts(health, cluster="us-east5")}
    assert found["xid"].count("==") == 2
    assert {"ecc", "nvlink"} <= set(found)


GKE_METRICS = {
    "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_TOTAL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_PROF_DRAM_ACTIVE",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_NVLINK_RX_BYTES",
    "DCGM_FI_PROF_NVLINK_TX_BYTES", "kubernetes_io:node_status_condition",
}  # fmt: skip
"""What a GKE cluster writes by itself: fields of the managed DCGM exporter, and the system metric of nodes."""


def test_an_alert_asks_for_what_the_cluster_collects() -> None:
    """Kube-state metrics of nodes, and DCGM's XIDs, ECC and NVLink errors, are in no GKE cluster by themselves."""
    for one in alerts(Health(), cluster="us-east5"):
        asked = set(re.findall(r"[A-Za-z_:]+(?={)", one.query))
        assert asked, one
        assert asked <= GKE_METRICS, one


def test_alerts_are_about_one_cluster() -> None:
    for one in alerts(Health(own_exporter=True), cluster="us-east5"):
        asked = re.findall(r"([A-Za-z_:]+){([^}]*)}", one.query)
        assert asked, one
        for metric, labels in asked:
            label = "cluster_name" if metric.startswith("kubernetes_io:") else "cluster"
            assert f'{label}="us-east5"' in labels.split(","), one


def test_without_watching_xids_only_metrics_are_left() -> None:
    names = {one.name for one in alerts(Health(watch_xid=False), cluster="c")}
    assert names == {"idle", "temperature", "throttle"}


def test_limits_come_from_the_configuration() -> None:
    health = Health(max_temperature_celsius=70, min_clock_mhz=900).model_copy(update={"alert_after": 300.0})
    found = {one.name: one for one in alerts(health, cluster="c")}
    assert found["temperature"].query.endswith("> 70")
    assert "< 900 and" in found["throttle"].query
    assert found["condition"].duration_seconds == 300


def test_metrics_of_ray_and_of_replicas_carry_the_experiment() -> None:
    found = {one["metadata"]["name"]: one["spec"] for one in monitoring_objects()}
    assert found.keys() == {"gkr-ray", "gkr-services"}
    for one in found.values():
        assert {"from": "gkr/experiment", "to": "experiment"} in one["targetLabels"]["fromPod"]
    replicas = found["gkr-services"]
    assert [one["port"] for one in replicas["endpoints"]] == [METRICS_PORT_NAME]
    assert replicas["selector"] == {"matchLabels": {"gkr/role": "service"}}
