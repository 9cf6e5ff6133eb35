"""Whole platform stacks, run without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.components.k8s.objects import PATCH_FORCE
from infra.policy.resource import Resource, Settings
from infra.policy.rules import check
from spec.errors import ConfigError
from spec.facts import ClusterFacts
from tests.builders.platforms import KUBECONFIG, PLATFORMS, chart_folders, outputs, region_facts, run_platform
from tests.builders.recorded_clouds import run_shipped

EAST = "prod.us-east5.platform"
CENTRAL = "prod.us-central1.platform"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in chart_folders(tmp_path).items():
        monkeypatch.setenv(key, value)


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_publishes_facts_that_gkr_reads(name: str) -> None:
    recorded = run_platform(name)
    facts = ClusterFacts.model_validate(recorded.outputs["facts"])
    assert facts.backend == "kubernetes"
    published = recorded.one("kubernetes:core/v1:ConfigMap", "gkr-system-gkr-facts")
    assert ClusterFacts.read_json(published.inputs["data"]["facts.json"]) == facts
    assert recorded.secret_outputs == []
    assert KUBECONFIG not in json.dumps([one.inputs for one in recorded.resources])


@pytest.mark.parametrize("name", PLATFORMS)
def test_everything_in_the_cluster_goes_through_its_one_provider(name: str) -> None:
    recorded = run_platform(name)
    [provider] = recorded.of("pulumi:providers:kubernetes")
    assert provider.inputs["clusterIdentifier"]
    assert provider.inputs["enableServerSideApply"] in (True, "true")
    assert provider.secret_inputs == ("kubeconfig",)
    inside = [one for one in recorded.resources if one.type.startswith("kubernetes:")]
    assert inside
    assert {one.provider for one in inside} == {provider.name}
    assert all(one.parents for one in inside)


@pytest.mark.parametrize("name", PLATFORMS)
def test_custom_resources_take_their_fields_back_and_the_rest_does_not(name: str) -> None:
    for one in run_platform(name).resources:
        if not one.type.startswith("kubernetes:") or one.type.startswith("kubernetes:helm"):
            continue
        forced = one.inputs["metadata"].get("annotations", {}).get(PATCH_FORCE) == "true"
        group = one.type.split(":")[1].split("/")[0]
        assert forced == (group in {"kueue.x-k8s.io", "ray.io", "networking.gke.io", "monitoring.googleapis.com"})


@pytest.mark.parametrize("name", PLATFORMS)
def test_queues_wait_for_the_webhooks_and_facts_for_everything(name: str) -> None:
    recorded = run_platform(name)
    [probe] = recorded.of("kubernetes:batch/v1:Job")
    queued = [one for one in recorded.resources if one.type.startswith("kubernetes:kueue.x-k8s.io/")]
    assert {one.type.split(":")[-1] for one in queued} >= {"ResourceFlavor", "ClusterQueue", "LocalQueue"}
    assert all(probe.name in one.depends_on for one in queued)
    facts = recorded.one("kubernetes:core/v1:ConfigMap", "gkr-system-gkr-facts")
    assert {one.name for one in queued} <= set(facts.depends_on)


def test_a_flavor_is_there_before_the_queue_that_names_it() -> None:
    recorded = run_platform(EAST)
    flavors = {one.name for one in recorded.of("kubernetes:kueue.x-k8s.io/v1beta2:ResourceFlavor")}
    for queue in recorded.of("kubernetes:kueue.x-k8s.io/v1beta2:ClusterQueue"):
        assert flavors <= set(queue.depends_on)
    for local in recorded.of("kubernetes:kueue.x-k8s.io/v1beta2:LocalQueue"):
        assert local.inputs["spec"]["clusterQueue"] in local.depends_on


def test_pods_on_gpus_wait_for_networks_and_installers() -> None:
    recorded = run_platform(EAST)
    [cluster] = recorded.of("kubernetes:ray.io/v1:RayCluster")
    networks = {one.name for one in recorded.of("kubernetes:networking.gke.io/v1:Network")}
    assert networks == {"gvnic-1", *(f"rdma-{index}" for index in range(8))}
    assert networks | {"kube-system-nccl-rdma-installer"} <= set(cluster.depends_on)
    assert cluster.ignore_changes == ("spec.suspend", "spec.workerGroupSpecs[*].replicas")


def test_a_mega_cluster_gets_its_eight_networks_and_both_daemons() -> None:
    recorded = run_platform(CENTRAL)
    networks = {one.name for one in recorded.of("kubernetes:networking.gke.io/v1:Network")}
    assert networks == {f"vpc{index}" for index in range(1, 9)}
    daemons = {one.name for one in recorded.of("kubernetes:apps/v1:DaemonSet")}
    assert daemons == {"kube-system-nccl-tcpxo-installer", "kube-system-device-injector"}


def test_the_syncers_address_lets_only_other_regions_in() -> None:
    access = run_platform(EAST).one("kubernetes:core/v1:Service", "gkr-0-syncer")
    spec = access.inputs["spec"]
    assert spec["loadBalancerIP"] == "10.0.0.9"
    assert spec["loadBalancerSourceRanges"] == ["10.64.0.0/12"]
    assert [one["port"] for one in spec["ports"]] == [7071, 7070]
    assert access.inputs["metadata"]["annotations"]["networking.gke.io/load-balancer-type"] == "Internal"


def test_facts_name_the_secret_that_shared_services_want_and_their_pods_mount_it() -> None:
    recorded = run_platform(EAST, "shared.token_secret=gkr-services")
    facts = ClusterFacts.model_validate(recorded.outputs["facts"])
    assert {one.secret for one in facts.services.values()} == {"gkr-services"}
    [cluster] = recorded.of("kubernetes:ray.io/v1:RayCluster")
    pods = [group["template"]["spec"] for group in cluster.inputs["spec"]["workerGroupSpecs"]]
    mounted = [one["secret"]["secretName"] for pod in pods for one in pod["volumes"] if "secret" in one]
    assert mounted == ["gkr-services"] * len(pods)


def test_a_region_that_was_never_up_is_named_with_the_command() -> None:
    with pytest.raises(ConfigError) as refused:
        run_platform(EAST, region={})
    assert "prod.us-east5 has no output facts" in refused.value.message
    assert "make up STACK=prod.us-east5" in refused.value.hint


@pytest.mark.parametrize("field", ["name", "region", "pools", "bucket", "registry"])
def test_a_missing_field_is_named_with_its_stack_and_the_command(field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_platform(EAST, region=outputs("prod.us-east5", **{field: None}))
    assert refused.value.message == f"facts of stack prod.us-east5 cannot be used: field {field} is missing"
    assert "make up STACK=prod.us-east5" in refused.value.hint


def test_a_region_without_a_kubeconfig_is_refused_too() -> None:
    region = {key: value for key, value in outputs("prod.us-east5").items() if key != "kubeconfig"}
    with pytest.raises(ConfigError, match="has no output kubeconfig"):
        run_platform(EAST, region=region)


@pytest.mark.parametrize("name", PLATFORMS)
def test_no_rule_refuses_a_shipped_platform(name: str) -> None:
    settings = Settings(environment=name.split(".")[0], engine=False)
    declared = [
        Resource(type=one.type, name=one.name, inputs=one.inputs, protect=one.protect)
        for one in run_platform(name).resources
    ]
    assert [str(one) for one in check(declared, settings=settings) if one.severity == "refuse"] == []


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_builds_on_what_its_region_really_exports(name: str) -> None:
    region = run_shipped(region_of(name))
    recorded = run_platform(name, region={"facts": region.outputs["facts"], "kubeconfig": KUBECONFIG})
    facts = ClusterFacts.model_validate(recorded.outputs["facts"])
    assert [pool.name for pool in facts.pools] == [pool.name for pool in region_facts(region_of(name)).pools]
    subnets = {one.inputs["name"] for one in region.of("gcp:compute/subnetwork:Subnetwork")}
    named = [one.inputs["spec"] for one in recorded.of("kubernetes:networking.gke.io/v1:GKENetworkParamSet")]
    assert {one["vpcSubnet"] for one in named} <= subnets
    assert all(isinstance(one["vpc"], str) for one in named)


def region_of(platform: str) -> str:
    return platform.removesuffix(".platform")
