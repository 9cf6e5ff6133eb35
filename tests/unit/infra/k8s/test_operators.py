"""Where operators come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from infra.components.k8s import kuberay, kueue
from infra.components.k8s.operators import Operator, adapted, image_values, read_manifests, source_of
from spec.errors import ConfigError
from spec.stack_platform import Chart, KubeRay, Kueue, Queue
from tests.builders.platforms import OPERATOR_MANIFESTS, chart_folders

OPERATOR = Operator(
    name="kuberay-operator", namespace="kuberay-system", deployment="kuberay-operator", values={},
    image="localhost/gkr/kuberay:1", resources={"requests": {"cpu": "2"}},
)  # fmt: skip


def chart(source: str, version: str = "0.17.0") -> Chart:
    return Chart(source=source, version=version)


def test_a_chart_in_a_registry_a_folder_with_a_chart_and_one_with_manifests(tmp_path: Path) -> None:
    environment = chart_folders(tmp_path)
    assert source_of(chart("oci://registry/kueue"), environment={}).kind == "registry"
    assert source_of(chart("$GKR_KUEUE_CHART"), environment=environment).kind == "chart"
    assert source_of(chart("$GKR_KUBERAY_CHART", "1.6.0"), environment=environment).kind == "manifests"


def test_a_source_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not set"):
        source_of(chart("$GKR_KUEUE_CHART"), environment={})
    with pytest.raises(ConfigError, match="not a folder"):
        source_of(chart(str(tmp_path / "absent")), environment={})
    with pytest.raises(ConfigError, match=r"neither Chart\.yaml nor manifests"):
        source_of(chart(str(tmp_path)), environment={})
    environment = chart_folders(tmp_path)
    with pytest.raises(ConfigError, match=r"version 0\.17\.0, configured is 0\.18\.0"):
        source_of(chart("$GKR_KUEUE_CHART", "0.18.0"), environment=environment)


def test_manifests_are_read_from_yaml_json_and_lists(tmp_path: Path) -> None:
    one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    (tmp_path / "1.yaml").write_text(yaml.safe_dump_all([one, one]), encoding="utf-8")
    (tmp_path / "2.json").write_text(json.dumps([one]), encoding="utf-8")
    listed = {"apiVersion": "v1", "kind": "List", "items": [one]}
    (tmp_path / "3.yaml").write_text(yaml.safe_dump(listed), encoding="utf-8")
    assert read_manifests(tmp_path) == [one] * 4
    (tmp_path / "4.yaml").write_text("just text\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no Kubernetes object"):
        read_manifests(tmp_path)


def test_manifests_get_our_image_and_sizes_and_nothing_else_changes() -> None:
    before = json.dumps(OPERATOR_MANIFESTS)
    found = adapted(OPERATOR_MANIFESTS, operator=OPERATOR)
    assert json.dumps(OPERATOR_MANIFESTS) == before
    assert [one["kind"] for one in found] == ["Deployment", "CustomResourceDefinition"]
    [container] = found[0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "localhost/gkr/kuberay:1"
    assert container["resources"] == {"requests": {"cpu": "2"}}


def test_manifests_without_the_operator_are_refused() -> None:
    with pytest.raises(ConfigError, match="no Deployment kuberay-operator"):
        adapted(OPERATOR_MANIFESTS[:1], operator=OPERATOR)


def test_an_image_is_taken_apart_as_charts_want_it() -> None:
    assert image_values("localhost/gkr/kueue:1") == {
        "repository": "localhost/gkr/kueue", "tag": "1", "pullPolicy": "IfNotPresent",
    }  # fmt: skip
    assert image_values("") == {}
    for wrong in ("kueue", "localhost:5000/kueue", f"kueue@sha256:{'0' * 64}"):
        with pytest.raises(ConfigError, match="not NAME:TAG"):
            image_values(wrong)


def test_kueue_is_told_what_to_queue_and_when_to_give_up() -> None:
    plain = Kueue(chart=chart("oci://x"), queues=[Queue(name="research")])
    config = plain.model_copy(update={"wait_for_pods_ready": 900.0})
    values = kueue.operator(config).values
    text = values["managerConfig"]["controllerManagerConfigYaml"]
    told = yaml.safe_load(text)
    assert told["integrations"]["frameworks"] == ["batch/job", "ray.io/rayjob", "ray.io/raycluster"]
    assert told["waitForPodsReady"]["timeout"] == "900s"
    assert "waitForPodsReady" not in kueue.configuration(plain)


def test_a_setting_that_an_older_kueue_refuses_is_refused_here() -> None:
    config = Kueue(chart=chart("oci://x"), queues=[Queue(name="research")], ignore_undeclared=True)
    with pytest.raises(ConfigError, match="would not start"):
        kueue.configuration(config)
    newer = config.model_copy(update={"chart": chart("oci://x", "0.19.2")})
    assert kueue.configuration(newer)["resources"] == {"quotaCheckStrategy": "IgnoreUndeclared"}


def test_kuberay_is_never_throttled_below_what_it_asks_for() -> None:
    for cores in (0.1, 8.0):
        operator = kuberay.operator(KubeRay(chart=chart("oci://x")).model_copy(update={"cpu": cores}))
        limit = float(operator.resources["limits"]["cpu"])
        assert limit >= max(cores, 1.0)
        assert operator.values["reconcileConcurrency"] > 1
