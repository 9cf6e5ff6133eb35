"""A global stack: services first, one network, identities with few roles, keys that stay, a budget by number."""

from __future__ import annotations

from tests.builders.recorded_clouds import NUMBER, STORAGE_AGENT, run_global, run_shipped

PROD = "prod.global"
MEMBER = "gcp:projects/iAMMember:IAMMember"
BROAD = {"roles/owner", "roles/editor", "roles/storage.admin", "roles/storage.objectAdmin"}


def test_services_stay_on_and_come_first() -> None:
    recorded = run_shipped(PROD)
    services = recorded.of("gcp:projects/service:Service")
    assert "container.googleapis.com" in {one.inputs["service"] for one in services}
    assert all(one.inputs["disableOnDestroy"] is False for one in services)
    last = max(recorded.resources.index(one) for one in services)
    later = [one for one in recorded.resources[last + 1 :] if one.custom]
    others = [one for one in recorded.resources if one.custom and one.name != "google" and one not in services]
    assert later == others


def test_the_primary_network() -> None:
    network = run_shipped(PROD).one("gcp:compute/network:Network", "primary")
    assert (network.inputs["name"], network.inputs["mtu"]) == ("gkr", 8896)
    assert network.inputs["autoCreateSubnetworks"] is False
    assert network.protect
    assert not run_shipped("dev.global").one("gcp:compute/network:Network", "primary").protect


def test_file_systems_are_reached_through_a_range_of_their_own() -> None:
    recorded = run_shipped(PROD)
    address = recorded.one("gcp:compute/globalAddress:GlobalAddress", "services-access").inputs
    assert (address["address"], address["prefixLength"]) == ("10.32.0.0", 20)
    connection = recorded.one("gcp:servicenetworking/connection:Connection", "services-access").inputs
    assert connection["reservedPeeringRanges"] == ["gkr-services-access"]
    assert recorded.one("gcp:compute/firewall:Firewall", "lustre").inputs["sourceRanges"] == ["10.32.0.0/20"]
    assert not run_shipped("dev.global").of("gcp:servicenetworking/connection:Connection")


def test_roles_are_few_and_granted_one_by_one() -> None:
    members = run_shipped(PROD).of(MEMBER)
    assert not {one.inputs["role"] for one in members} & BROAD
    nodes = {one.inputs["role"] for one in members if one.inputs["member"].startswith("serviceAccount:gkr-prod-nodes@")}
    assert nodes == {"roles/container.defaultNodeServiceAccount"}
    types = {one.type for one in run_shipped(PROD).resources if "iam" in one.type.lower()}
    assert all("Member" in one for one in types)
    assert not run_shipped(PROD).of("gcp:serviceaccount/key:Key")


def test_who_previews_may_read_the_project_its_grants_and_its_clusters_and_change_nothing() -> None:
    granted = [one.inputs for one in run_shipped(PROD).of(MEMBER)]
    roles = {one["role"] for one in granted if one["member"].startswith("serviceAccount:preview@")}
    assert roles == {
        "roles/viewer", "roles/iam.securityReviewer", "roles/container.viewer",
        "roles/serviceusage.serviceUsageConsumer",  # the provider charges its requests to the project
    }  # fmt: skip


def test_keys_can_never_be_lost_with_a_stack() -> None:
    recorded = run_global(PROD, "protect=false")
    kept = [*recorded.of("gcp:kms/keyRing:KeyRing"), *recorded.of("gcp:kms/cryptoKey:CryptoKey")]
    assert len(kept) == 3
    assert all(one.protect and one.retain_on_delete for one in kept)


def test_the_shared_bucket_is_encrypted_once_the_service_may_use_the_key() -> None:
    recorded = run_shipped(PROD)
    bucket = recorded.one("gcp:storage/bucket:Bucket", "example-gkr-prod-data")
    assert bucket.inputs["encryption"] == {"defaultKmsKeyName": "data-id"}
    assert bucket.inputs["customPlacementConfig"] == {"dataLocations": ["US-EAST5", "US-CENTRAL1"]}
    assert "data-storage" in bucket.depends_on
    grant = recorded.one("gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember", "data-storage").inputs
    # Asked for, not put together from the number: in a new project the account is made by the question.
    assert grant["member"] == STORAGE_AGENT


def test_a_key_of_another_place_encrypts_no_bucket() -> None:
    recorded = run_global(PROD, "keys.location=global")
    assert "encryption" not in recorded.one("gcp:storage/bucket:Bucket", "example-gkr-prod-data").inputs


def test_the_budget_is_the_projects_and_tells_somebody() -> None:
    recorded = run_shipped(PROD)
    [budget] = recorded.of("gcp:billing/budget:Budget")
    assert budget.inputs["budgetFilter"]["projects"] == [f"projects/{NUMBER}"]
    assert budget.inputs["amount"]["specifiedAmount"] == {"currencyCode": "USD", "units": "20000000"}
    assert [one["thresholdPercent"] for one in budget.inputs["thresholdRules"]] == [0.5, 0.8, 1]
    [channel] = recorded.of("gcp:monitoring/notificationChannel:NotificationChannel")
    assert budget.inputs["allUpdatesRule"] == {"monitoringNotificationChannels": [f"{channel.name}-id"]}
    assert not run_shipped("dev.global").of("gcp:billing/budget:Budget")


def test_a_mirror_fetches_and_our_own_registry_is_cleaned() -> None:
    recorded = run_global(PROD, "registries[0].mirror_of=registry.example.com")
    [mirror] = recorded.of("gcp:artifactregistry/repository:Repository")
    assert mirror.inputs["mode"] == "REMOTE_REPOSITORY"
    assert mirror.inputs["remoteRepositoryConfig"] == {"commonRepository": {"uri": "https://registry.example.com"}}
    [own] = run_shipped(PROD).of("gcp:artifactregistry/repository:Repository")
    assert own.inputs["mode"] == "STANDARD_REPOSITORY"
    assert {one["action"] for one in own.inputs["cleanupPolicies"]} == {"DELETE", "KEEP"}
