"""Each rule on a resource that it accepts and on one that it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from infra.policy import RULES, Resource, Settings, check
from infra.policy.__main__ import main
from infra.policy.stacks import settings_for
from tests.builders.previews import BUCKET, CLUSTER, LABELS, POOL, bucket, cluster, cpu_pool, ultra_pool
from tests.builders.review_cases import CASES

PROD = settings_for("prod.us-east5", stacks=["prod.us-east5"])
DIGEST = "@sha256:" + "0" * 64
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"


def broken(rule: str, resource: Resource, *, settings: Settings = PROD) -> list[str]:
    """Messages of one rule."""
    return [one.message for one in check([resource], settings=settings, only=[rule])]


def changed(inputs: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a dotted path; None removes the key."""
    other = copy.deepcopy(inputs)
    *parents, last = path.split(".")
    inner = other
    for one in parents:
        inner = inner[one]
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = value
    return other


def pod(image: str, *, env: list[dict[str, Any]] | None = None) -> Resource:
    container = {"name": "main", "image": image, "env": env or []}
    return Resource("kubernetes:core/v1:Pod", "pod", {"spec": {"containers": [container]}})


@pytest.mark.parametrize(
    ("resource_type", "inputs"),
    [(POOL, ultra_pool()), (POOL, cpu_pool()), (CLUSTER, cluster()), (BUCKET, bucket())],
)
def test_what_we_declare_is_accepted_by_every_rule(resource_type: str, inputs: dict[str, Any]) -> None:
    assert check([Resource(resource_type, "a", inputs, protect=True)], settings=PROD) == []


@pytest.mark.parametrize(
    ("rule", "resource_type", "inputs", "path", "value"),
    [
        ("labels", POOL, ultra_pool(), "nodeConfig.resourceLabels", {}),
        ("labels", BUCKET, bucket(), "labels", None),
        ("public-node-address", POOL, ultra_pool(), "networkConfig.enablePrivateNodes", False),
        ("public-node-address", CLUSTER, cluster(), "privateClusterConfig", None),
        ("open-to-the-world", CLUSTER, cluster(), "masterAuthorizedNetworksConfig",
         {"cidrBlocks": [{"cidrBlock": "0.0.0.0/0"}]}),
        ("allowed-regions", POOL, ultra_pool(), "nodeLocations", ["europe-west4-a"]),
        ("allowed-regions", BUCKET, bucket(), "location", "EUROPE-WEST4"),
        ("allowed-machines", POOL, cpu_pool(), "nodeConfig.machineType", "m1-ultramem-160"),
        ("allowed-machines", POOL, ultra_pool(), "nodeConfig.machineType", "a2-ultragpu-8g"),
        ("gpu-capacity", POOL, ultra_pool(), "nodeConfig.reservationAffinity", None),
        ("gpu-capacity", POOL, ultra_pool(), "nodeConfig.reservationAffinity",
         {"consumeReservationType": "ANY_RESERVATION"}),
        ("gpu-capacity", POOL, ultra_pool(), "nodeConfig.spot", True),
        ("gpu-taint", POOL, ultra_pool(), "nodeConfig.taints",
         [{"key": "nvidia.com/gpu", "value": "present", "effect": "PREFER_NO_SCHEDULE"}]),
        ("gpu-fabric", POOL, ultra_pool(), "networkConfig.additionalNodeNetworkConfigs",
         ultra_pool()["networkConfig"]["additionalNodeNetworkConfigs"][1:]),
        ("gpu-fabric", POOL, ultra_pool(), "networkConfig.acceleratorNetworkProfile", "auto"),
        ("deletion-protection", CLUSTER, cluster(), "deletionProtection", False),
        ("buckets", BUCKET, bucket(), "uniformBucketLevelAccess", None),
        ("buckets", BUCKET, bucket(), "publicAccessPrevention", "inherited"),
        ("buckets", BUCKET, bucket(), "forceDestroy", True),
    ],
)  # fmt: skip
def test_one_wrong_field_is_found_by_its_rule_alone(
    rule: str, resource_type: str, inputs: dict[str, Any], path: str, value: Any
) -> None:
    resource = Resource(resource_type, "a", changed(inputs, path, value), protect=True)
    found = check([resource], settings=PROD)
    assert {one.rule for one in found} == {rule}
    assert all(one.remedy and one.severity == "refuse" for one in found)


def test_a_machine_has_no_address_on_the_internet() -> None:
    inside = {"networkInterfaces": [{"network": "gkr"}], "machineType": "n2-standard-8", "labels": LABELS}
    outside = {**inside, "networkInterfaces": [{"network": "gkr", "accessConfigs": [{"natIp": "203.0.113.9"}]}]}
    found = [check([Resource("gcp:compute/instance:Instance", "vm", one)], settings=PROD) for one in (inside, outside)]
    assert [[one.rule for one in each] for each in found] == [[], ["public-node-address"]]


@pytest.mark.parametrize("capacity", ["reservation", "spot", "flex-start"])
def test_flex_start_counts_beside_reservation_and_spot(capacity: str) -> None:
    assert broken("gpu-capacity", Resource(POOL, "a", ultra_pool(capacity=capacity))) == []


def test_queued_provisioning_is_flex_start() -> None:
    inputs = {**ultra_pool(capacity="on-demand"), "queuedProvisioning": {"enabled": True}}
    assert broken("gpu-capacity", Resource(POOL, "a", inputs)) == []


def test_the_managed_fabric_takes_no_networks_of_its_own() -> None:
    inputs = changed(ultra_pool(), "networkConfig.acceleratorNetworkProfile", "auto")
    inputs["networkConfig"]["additionalNodeNetworkConfigs"] = []
    assert broken("gpu-fabric", Resource(POOL, "a", inputs)) == []


def test_mocks_numbers_as_floats_change_nothing() -> None:
    inputs = changed(ultra_pool(), "nodeCount", 320.0)
    assert check([Resource(POOL, "a", inputs)], settings=PROD) == []


@pytest.mark.parametrize(
    ("inputs", "wrong"),
    [
        ({"allows": [{"protocol": "tcp"}], "sourceRanges": ["10.64.0.0/14"]}, False),
        ({"allows": [{"protocol": "tcp"}], "sourceRanges": ["10.0.0.0/8", "::/0"]}, True),
        ({"allows": [{"protocol": "tcp"}]}, True),
        ({"allows": [{"protocol": "tcp"}], "sourceTags": ["gke"]}, False),
        ({"allows": [{"protocol": "tcp"}], "sourceRanges": UNKNOWN}, False),
        ({"allows": [{"protocol": "tcp"}], "direction": "EGRESS", "destinationRanges": ["0.0.0.0/0"]}, False),
        ({"denies": [{"protocol": "all"}], "sourceRanges": ["0.0.0.0/0"]}, False),
    ],
)
def test_a_firewall_admits_somebody_in_particular(inputs: dict[str, Any], *, wrong: bool) -> None:
    assert bool(broken("open-to-the-world", Resource("gcp:compute/firewall:Firewall", "f", inputs))) is wrong


@pytest.mark.parametrize(
    ("image", "severity"),
    [
        (f"us-east5-docker.pkg.dev/p/gkr/trainer{DIGEST}", None),
        ("us-east5-docker.pkg.dev/p/gkr/trainer:1.2.3", "refuse"),
        ("us-docker.pkg.dev/gce-ai-infra/gpudirect-gib/nccl-plugin-gib:v1.1.1", "warn"),
        ("registry.k8s.io/kueue/kueue:v0.17.0", "warn"),
        ("registry.k8s.io/kueue/kueue:latest", "refuse"),
        ("registry.k8s.io/pause", "refuse"),
        ("localhost:5000/pause", "refuse"),
        (UNKNOWN, None),
    ],
)
def test_an_image_is_named_by_digest_or_at_least_by_a_version(image: str, severity: str | None) -> None:
    found = check([pod(image)], settings=PROD, only=["image-by-digest"])
    assert [one.severity for one in found] == ([severity] if severity else [])


@pytest.mark.parametrize(("applies", "severity"), [(False, "warn"), (True, "refuse")])
def test_a_placeholder_may_be_looked_at_and_not_brought_up(*, applies: bool, severity: str) -> None:
    settings = settings_for("prod.us-east5.platform", stacks=[], applies=applies)
    example = f"us-east5-docker.pkg.dev/p/gkr/services{DIGEST}"
    facts = Resource(
        "kubernetes:core/v1:ConfigMap", "facts", {"data": {"facts.json": f'{{"image": "trainer{DIGEST}"}}'}}
    )
    found = check([pod(example), facts], settings=settings, only=["placeholder-image"])
    assert {one.severity for one in found} == {severity}
    assert {one.remedy.split("`")[1] for one in found} == {
        "make image NAME=services PUSH=us-east5-docker.pkg.dev/p/gkr", "make image NAME=trainer PUSH=REGISTRY",
    }  # fmt: skip
    built = pod(example.replace("000000", "00000a"))
    assert check([built, pod(UNKNOWN)], settings=settings, only=["placeholder-image"]) == []


def test_images_are_found_however_deep_and_images_of_the_bed_are_not_looked_at() -> None:
    head = {"template": {"spec": {"initContainers": [{"image": "a:latest"}], "containers": [{"image": "b"}]}}}
    cluster_of_ray = Resource("kubernetes:ray.io/v1:RayCluster", "r", {"spec": {"workerGroupSpecs": [head]}})
    assert len(broken("image-by-digest", cluster_of_ray)) == 2
    assert broken("image-by-digest", cluster_of_ray, settings=settings_for("local.bed-a", stacks=[])) == []


@pytest.mark.parametrize(
    ("resource_type", "settings", "needed"),
    [
        (POOL, PROD, True),
        (POOL, settings_for("dev.us-east4", stacks=[]), False),
        ("gcp:kms/cryptoKey:CryptoKey", Settings(environment="staging"), True),
        ("gcp:kms/cryptoKey:CryptoKey", settings_for("dev.us-east4", stacks=[]), False),
        ("gcp:compute/reservation:Reservation", PROD, True),
        ("gcp:compute/firewall:Firewall", PROD, False),
    ],
)
def test_what_must_be_protected_where(resource_type: str, settings: Settings, *, needed: bool) -> None:
    inputs = ultra_pool() if resource_type == POOL else {}
    for protect in (False, True, None):
        resource = Resource(resource_type, "a", inputs, protect=protect)
        assert bool(broken("deletion-protection", resource, settings=settings)) is (needed and protect is False)


def test_a_pool_of_spare_machines_needs_no_protection() -> None:
    assert broken("deletion-protection", Resource(POOL, "a", ultra_pool(capacity="spot"), protect=False)) == []


@pytest.mark.parametrize(
    ("resource_type", "inputs", "rule"),
    [
        ("gcp:projects/iAMMember:IAMMember", {"role": "roles/editor"}, "broad-roles"),
        ("gcp:projects/iAMMember:IAMMember", {"role": "roles/storage.objectAdmin"}, "broad-roles"),
        ("gcp:storage/bucketIAMMember:BucketIAMMember", {"role": "roles/owner"}, "broad-roles"),
        ("gcp:projects/iAMBinding:IAMBinding", {"role": "roles/viewer"}, "policy-takeover"),
        ("gcp:projects/iAMPolicy:IAMPolicy", {}, "policy-takeover"),
        ("gcp:storage/bucketIAMMember:BucketIAMMember", {"member": "allUsers"}, "public-members"),
        ("gcp:serviceaccount/key:Key", {}, "service-account-keys"),
        ("gcp:storage/hmacKey:HmacKey", {}, "service-account-keys"),
    ],
)
def test_identities_are_narrow(resource_type: str, inputs: dict[str, Any], rule: str) -> None:
    assert {one.rule for one in check([Resource(resource_type, "a", inputs)], settings=PROD)} == {rule}


def test_narrow_grants_are_accepted() -> None:
    grants = [
        Resource("gcp:storage/bucketIAMMember:BucketIAMMember", "a",
                 {"role": "roles/storage.objectAdmin", "member": "principal://iam.googleapis.com/x"}),
        Resource("gcp:projects/iAMMember:IAMMember", "b", {"role": "roles/logging.logWriter", "member": UNKNOWN}),
    ]  # fmt: skip
    assert check(grants, settings=PROD) == []


def test_a_secret_in_clear_is_found_and_not_repeated() -> None:
    secret = Resource("kubernetes:core/v1:Secret", "s", {"stringData": {"password": "hunter2", "user": "[secret]"}})
    messages = broken("clear-secrets", secret)
    assert len(messages) == 1
    assert "password" in messages[0]
    assert "hunter2" not in messages[0]
    assert broken("clear-secrets", secret, settings=Settings(engine=False)) == []


def test_an_environment_variable_takes_a_secret_by_reference() -> None:
    clear = {"name": "HF_TOKEN", "value": "hunter2"}
    named = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    assert len(broken("clear-secrets", pod(f"a{DIGEST}", env=[clear]))) == 1
    assert broken("clear-secrets", pod(f"a{DIGEST}", env=[named, {"name": "LEVEL", "value": "info"}])) == []


def test_a_load_balancer_is_internal() -> None:
    def service(annotations: dict[str, str]) -> Resource:
        return Resource(
            "kubernetes:core/v1:Service",
            "s",
            {"metadata": {"annotations": annotations}, "spec": {"type": "LoadBalancer"}},
        )

    assert len(broken("public-load-balancer", service({}))) == 1
    assert broken("public-load-balancer", service({"networking.gke.io/load-balancer-type": "Internal"})) == []


def test_a_global_stack_may_use_every_region_of_its_environment() -> None:
    settings = settings_for("prod.global", stacks=["prod.us-east5", "prod.us-central1", "dev.us-east4", "prod.global"])
    assert settings.regions == {"us-east5", "us-central1"}
    for location, wrong in (("US-CENTRAL1", False), ("US", False), ("us-east4", True)):
        assert (
            bool(broken("allowed-regions", Resource(BUCKET, "b", {"location": location}), settings=settings)) is wrong
        )


def test_required_labels_are_named_when_they_lack() -> None:
    settings = Settings(labels=("environment", "cost-center"))
    messages = broken("labels", Resource(BUCKET, "b", bucket()), settings=settings)
    assert len(messages) == 1
    assert "cost-center" in messages[0]


def test_refusals_come_first_and_nothing_comes_twice() -> None:
    wrong = changed(ultra_pool(), "nodeConfig.taints", [])
    found = check(
        [pod("registry.k8s.io/pause:3.10"), Resource(POOL, "a", wrong), Resource(POOL, "a", wrong)], settings=PROD
    )
    assert [one.severity for one in found] == ["refuse", "warn"]


def test_the_command_lists_the_rules_and_checks_a_preview(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(RULES)
    assert main(["--list", "-o", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(RULES)
    file = tmp_path / "preview.json"
    file.write_text(CASES["against-policy"]().text)
    assert main([str(file)]) == 6
    assert "roles/editor" in capsys.readouterr().out
    assert main([str(file), "-o", "json"]) == 6
    assert {one["rule"] for one in json.loads(capsys.readouterr().out)} >= {"broad-roles", "gpu-capacity"}
    assert main([str(file), "--rule", "labels"]) == 0
    file.write_text(CASES["new-region"]().text)
    assert main([str(file)]) == 0
