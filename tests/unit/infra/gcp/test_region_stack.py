"""A region as a whole: size, parents, providers, networks, storage, what it tells the platform, and what it refuses."""

from __future__ import annotations

import json
from typing import Any, cast

import pulumi
import pytest

from infra.facts import read_region
from spec.machines import machine
from spec.stack_fabric import vpcs
from spec.stack_region import RegionStack
from tests.builders.recorded_clouds import (
    CLOUDS,
    DNS_ENDPOINT,
    NUMBER,
    REGIONS,
    global_outputs,
    run_region,
    run_shipped,
)
from tests.builders.stack_files import shipped

ULTRA, MEGA, SMALL, BED = "prod.us-east5", "prod.us-central1", "dev.us-east4", "local.bed-a"
NETWORK, SUBNET, FIREWALL = (f"gcp:compute/{one}" for one in ("network:Network", "subnetwork:Subnetwork",
                                                              "firewall:Firewall"))  # fmt: skip
CLUSTER, BUCKET, GRANT = "gcp:container/cluster:Cluster", "gcp:storage/bucket:Bucket", (
    "gcp:storage/bucketIAMMember:BucketIAMMember"
)  # fmt: skip
ADDRESS, RESERVATION = "gcp:compute/address:Address", "gcp:compute/reservation:Reservation"


@pytest.mark.parametrize("name", CLOUDS)
def test_a_stack_is_small_and_everything_in_it_has_a_component_and_our_provider(name: str) -> None:
    resources = run_shipped(name).resources
    assert 10 < len(resources) < 300
    for one in resources:
        if one.type.startswith("pulumi:providers"):
            assert one.inputs["project"] == shipped(name).value.project
        elif one.custom:
            assert one.parents, one
            assert one.parents[-1].startswith("gkr:"), one
            assert one.provider == "google", one
        else:
            assert one.type.startswith("gkr:"), one


@pytest.mark.parametrize("name", CLOUDS)
def test_no_secret_is_in_clear(name: str) -> None:
    recorded = run_shipped(name)
    assert ("kubeconfig" in recorded.secret_outputs) is (name in REGIONS)
    assert DNS_ENDPOINT not in json.dumps(recorded.outputs)


@pytest.mark.parametrize("name", REGIONS)
def test_the_platform_can_read_what_a_region_says(name: str) -> None:
    config: Any = shipped(name).value
    found = read_region(run_shipped(name).outputs["facts"], stack=name)
    assert (found.name, found.region, found.bucket) == (config.cluster.name, config.region, config.bucket.address)
    assert [one.name for one in found.pools] == [config.cpu_pool.name, *(one.name for one in config.gpu_pools)]
    assert [one.nodes for one in found.pools[1:]] == [config.nodes_now(one) for one in config.gpu_pools]
    assert {one.machine for one in found.fabrics} == set(config.fabrics)
    assert found.managed_monitoring is config.cluster.dcgm
    assert (found.syncer is None) is (config.syncer.mode == "none")


def test_facts_of_the_syncer() -> None:
    syncer = read_region(run_shipped(ULTRA).outputs["facts"], stack=ULTRA).syncer
    assert syncer is not None
    assert (syncer.host, syncer.reserved) == ("address of us-east5-syncer", True)
    assert syncer.peers == ["10.64.0.0/10"]
    other = read_region(run_shipped(BED).outputs["facts"], stack=BED).syncer
    assert other is not None
    assert (other.host, other.reserved) == ("10.202.0.1", False)


def test_a_region_before_its_environment_names_the_stack_and_the_command() -> None:
    with pytest.raises(pulumi.RunError, match=r"stack prod\.global has no output(.|\n)*make up STACK=prod\.global"):
        run_region(ULTRA, environment={})


def test_a_missing_field_of_the_environment_is_named() -> None:
    known = global_outputs("prod.global")["environment"]
    without = {"environment": {key: value for key, value in known.items() if key != "node_account"}}
    with pytest.raises(pulumi.RunError, match=r"field node_account is missing(.|\n)*make up STACK=prod\.global"):
        run_region(ULTRA, environment=without)


def test_a_newer_environment_may_say_more() -> None:
    more = {"environment": {**global_outputs("prod.global")["environment"], "colour": "blue"}}
    assert run_region(ULTRA, environment=more).outputs["facts"] == run_shipped(ULTRA).outputs["facts"]


def test_the_subnet_has_the_configured_ranges() -> None:
    inputs = run_shipped(ULTRA).one(SUBNET, "nodes").inputs
    assert inputs["ipCidrRange"] == "10.0.0.0/20"
    assert inputs["network"] == global_outputs("prod.global")["environment"]["network"]
    assert inputs["privateIpGoogleAccess"] is True
    assert {one["rangeName"]: one["ipCidrRange"] for one in inputs["secondaryIpRanges"]} == {
        "pods": "10.64.0.0/14", "services": "10.48.0.0/20",
    }  # fmt: skip


def test_nat_has_addresses_of_its_own() -> None:
    recorded, config = run_shipped(ULTRA), cast(RegionStack, shipped(ULTRA).value)
    count = config.network.nat.addresses
    nat = recorded.one("gcp:compute/routerNat:RouterNat", "nat").inputs
    assert nat["natIps"] == [f"link of gkr-us-east5-nat-{index}" for index in range(count)]
    assert nat["subnetworks"] == [{"name": "link of gkr-us-east5", "sourceIpRangesToNats": ["ALL_IP_RANGES"]}]
    assert len([one for one in recorded.of(ADDRESS) if one.inputs["addressType"] == "EXTERNAL"]) == count


@pytest.mark.parametrize("name", REGIONS)
def test_a_fabric_takes_the_networks_that_the_quota_check_counts(name: str) -> None:
    config: Any = shipped(name).value
    assert len(run_shipped(name).of(NETWORK)) == sum(vpcs(machine(one)) for one in config.fabrics)


def test_the_roce_network_is_of_the_zone_and_takes_no_rules() -> None:
    recorded = run_shipped(ULTRA)
    roce = recorded.one(NETWORK, "rdma").inputs
    assert roce["networkProfile"] == "projects/example-gkr-prod/global/networkProfiles/us-east5-a-vpc-roce"
    assert roce["mtu"] == 8896
    rules = {one.inputs["name"] for one in recorded.of(FIREWALL)}
    assert rules == {"us-east5-gvnic-1-inside", "us-east5-syncer"}


def test_every_mega_network_is_its_own_with_packets_of_the_right_size() -> None:
    networks = run_shipped(MEGA).of(NETWORK)
    assert [one.inputs["mtu"] for one in networks] == [8244] * 8
    assert not any("networkProfile" in one.inputs for one in networks)
    inside = [one for one in run_shipped(MEGA).of(FIREWALL) if one.inputs["name"].endswith("-inside")]
    assert len(inside) == 8
    assert all(one.inputs["sourceRanges"] == ["192.168.0.0/16"] for one in inside)


def test_subnets_of_a_fabric_do_not_overlap() -> None:
    ranges = {one.name: one.inputs["ipCidrRange"] for one in run_shipped(ULTRA).of(SUBNET) if one.name != "nodes"}
    lanes = {f"rdma-{index}": f"192.168.{16 * (index + 1)}.0/20" for index in range(8)}
    assert ranges == {"gvnic-1": "192.168.0.0/20", **lanes}


def test_only_the_two_ports_of_the_syncer_are_open_between_regions() -> None:
    recorded = run_shipped(ULTRA)
    rule = recorded.one(FIREWALL, "syncer").inputs
    assert rule["allows"] == [{"protocol": "tcp", "ports": ["7070", "7071"]}]
    assert rule["sourceRanges"] == ["10.64.0.0/10"]
    tags = recorded.one("gcp:container/nodePool:NodePool", "cpu").inputs["nodeConfig"]["tags"]
    assert rule["targetTags"] == tags
    address = recorded.one(ADDRESS, "syncer").inputs
    assert (address["addressType"], address["purpose"]) == ("INTERNAL", "SHARED_LOADBALANCER_VIP")


def test_a_region_that_takes_no_syncers_opens_nothing() -> None:
    assert "syncer" not in {one.name for one in run_shipped(SMALL).resources}
    assert run_shipped(SMALL).outputs["facts"].get("syncer") is None


def test_the_cluster() -> None:
    cluster = run_shipped(ULTRA).one(CLUSTER, "us-east5")
    inputs = cluster.inputs
    assert "nat" in cluster.depends_on
    assert (inputs["location"], inputs["minMasterVersion"]) == ("us-east5", "1.34.1-gke.1829001")
    assert inputs["enableMultiNetworking"] is True
    assert inputs["datapathProvider"] == "ADVANCED_DATAPATH"
    assert inputs["privateClusterConfig"]["enablePrivateNodes"] is True
    assert inputs["controlPlaneEndpointsConfig"]["ipEndpointsConfig"] == {"enabled": False}
    assert inputs["workloadIdentityConfig"] == {"workloadPool": "example-gkr-prod.svc.id.goog"}
    assert "DCGM" in inputs["monitoringConfig"]["enableComponents"]
    assert "SYSTEM_COMPONENTS" in inputs["monitoringConfig"]["enableComponents"]
    assert "rayOperatorConfigs" not in inputs["addonsConfig"]
    assert inputs["nodeConfig"]["serviceAccount"] == "gkr-prod-nodes@example-gkr-prod.iam.gserviceaccount.com"
    window = inputs["maintenancePolicy"]["recurringWindow"]
    assert (window["startTime"], window["endTime"]) == ("2026-01-03T02:00:00Z", "2026-01-03T14:00:00Z")
    [exclusion] = inputs["maintenancePolicy"]["maintenanceExclusions"]
    assert exclusion["exclusionOptions"] == {
        "scope": "NO_MINOR_OR_NODE_UPGRADES", "endTimeBehavior": "UNTIL_END_OF_SUPPORT",
    }  # fmt: skip
    assert cluster.protect
    assert inputs["deletionProtection"] is True
    assert set(cluster.ignore_changes) == {"nodeConfig", "initialNodeCount"}


def test_a_control_plane_by_address_only_for_whom_it_is_configured() -> None:
    recorded = run_region(ULTRA, "cluster.authorized_ranges=[203.0.113.0/24]", "cluster.dcgm=false")
    inputs = recorded.one(CLUSTER, "us-east5").inputs
    assert inputs["controlPlaneEndpointsConfig"]["ipEndpointsConfig"] == {"enabled": True}
    assert inputs["masterAuthorizedNetworksConfig"]["cidrBlocks"] == [{"cidrBlock": "203.0.113.0/24"}]
    assert "DCGM" not in inputs["monitoringConfig"]["enableComponents"]


def test_buckets_are_private_kept_and_next_to_the_gpus() -> None:
    bucket = run_shipped(ULTRA).one(BUCKET, "example-gkr-prod-us-east5")
    inputs = bucket.inputs
    assert (bucket.protect, bucket.retain_on_delete, inputs["forceDestroy"]) == (True, True, False)
    assert inputs["location"] == "US-EAST5"
    assert inputs["uniformBucketLevelAccess"] is True
    assert inputs["publicAccessPrevention"] == "enforced"
    assert inputs["hierarchicalNamespace"] == {"enabled": True}
    assert inputs["softDeletePolicy"] == {"retentionDurationSeconds": 0}


def test_old_runs_go_from_a_bucket_and_the_datasets_beside_them_stay() -> None:
    abandoned, old = run_shipped(ULTRA).one(BUCKET, "example-gkr-prod-us-east5").inputs["lifecycleRules"]
    assert abandoned == {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}}
    assert old == {"action": {"type": "Delete"}, "condition": {"age": 90, "matchesPrefixes": ["runs/"]}}
    recorded = run_region(ULTRA, "bucket.delete_below=[]")
    _, everything = recorded.one(BUCKET, "example-gkr-prod-us-east5").inputs["lifecycleRules"]
    assert everything["condition"] == {"age": 90}
    recorded = run_region(ULTRA, "bucket.delete_after_days=null")
    [only] = recorded.one(BUCKET, "example-gkr-prod-us-east5").inputs["lifecycleRules"]
    assert only == abandoned


def test_pods_of_this_cluster_alone_write_to_its_bucket_and_read_the_shared_one() -> None:
    grants: dict[str, set[str]] = {}
    for one in run_shipped(ULTRA).of(GRANT):
        if one.inputs["member"].startswith("principalSet:"):
            assert NUMBER in one.inputs["member"]
            assert one.inputs["member"].endswith("/projects/example-gkr-prod/locations/us-east5/clusters/us-east5")
            grants.setdefault(one.inputs["bucket"], set()).add(one.inputs["role"])
    assert grants == {
        "example-gkr-prod-us-east5": {"roles/storage.objectUser", "roles/storage.legacyBucketReader"},
        "example-gkr-prod-data": {"roles/storage.objectViewer", "roles/storage.legacyBucketReader"},
    }


def test_nothing_is_kept_of_a_stack_that_protects_nothing() -> None:
    for name in (SMALL, BED):
        assert not any(one.protect or one.retain_on_delete for one in run_shipped(name).resources)
        assert all(one.inputs["forceDestroy"] for one in run_shipped(name).of(BUCKET))


def test_a_reservation_is_made_only_when_asked_and_then_for_good() -> None:
    assert not any(run_shipped(name).of(RESERVATION) for name in REGIONS)
    made = run_region(BED, "reservations[0].create=true")
    [reservation] = made.of(RESERVATION)
    assert reservation.protect
    assert not reservation.retain_on_delete
    assert reservation.inputs["specificReservationRequired"] is True
    wanted = reservation.inputs["specificReservation"]
    assert wanted["count"] == 8
    assert wanted["instanceProperties"]["machineType"] == "a3-ultragpu-8g"
    assert "localSsds" not in wanted["instanceProperties"]
    assert "bed-ultra" in made.one("gcp:container/nodePool:NodePool", "ultra").depends_on


def test_file_systems_are_in_the_zone_of_the_gpus() -> None:
    [lustre] = run_shipped(ULTRA).of("gcp:lustre/instance:Instance")
    assert lustre.inputs["location"] == "us-east5-a"
    assert (lustre.inputs["capacityGib"], lustre.inputs["perUnitStorageThroughput"]) == ("180000", "500")
    assert lustre.inputs["filesystem"] == "scratch"
    assert lustre.protect


def test_the_platform_is_told_who_may_launch_and_which_machines_come_on_request() -> None:
    found = read_region(run_shipped(SMALL).outputs["facts"], stack=SMALL)
    assert found.researchers == ["group:research@example.com"]
    assert found.queued == {"mega-flex": 86_400}
    assert read_region(run_shipped(ULTRA).outputs["facts"], stack=ULTRA).queued == {}
    unlimited = run_region(SMALL, "gpu_pools.mega-flex.capacity.max_run=null").outputs["facts"]
    assert unlimited["queued"] == {"mega-flex": 7 * 86_400}


def test_a_cluster_resolves_the_groups_that_launch_in_it() -> None:
    assert run_shipped(ULTRA).one(CLUSTER, "us-east5").inputs["authenticatorGroupsConfig"] == {
        "securityGroup": "gke-security-groups@example.com"
    }
    assert "authenticatorGroupsConfig" not in run_shipped(BED).one(CLUSTER, "bed-a").inputs


@pytest.mark.parametrize("name", REGIONS)
def test_a_load_balancer_reaches_every_node_of_a_cluster_of_any_size(name: str) -> None:
    [cluster] = run_shipped(name).of(CLUSTER)
    assert cluster.inputs["enableL4IlbSubsetting"] is True
