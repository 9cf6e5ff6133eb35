"""Rules of global, region and platform stacks that are not about machines."""

from __future__ import annotations

import pytest

from tests.builders.stack_files import problems_of

GLOBAL, REGION, PLATFORM = "prod.global", "prod.us-east5", "prod.us-east5.platform"
CASES: list[tuple[str, str, str, str, str]] = [
    (GLOBAL, "network.services_access=10.32.0.0/24", "network.services_access", "too small", "/22"),
    (GLOBAL, "network.services_access=10.64.0.0/20", "network.services_access", "neither could be routed", "free"),
    (GLOBAL, "network.mtu=9000", "network.mtu", "at most 8896", ""),
    (GLOBAL, "apis=[a.example.com, a.example.com]", "apis[1]", "given twice", "remove one"),
    (GLOBAL, "registries=[{name: a, location: us}, {name: a, location: eu}]", "registries[1]", "given twice", "remove"),
    (GLOBAL, "registries.charts.location=''", "registries[0].location", "no region to take it from", "location: us"),
    (GLOBAL, "buckets.0.location=''", "buckets[0].location", "no region to take it from", "location: us"),
    (GLOBAL, "buckets.0.hierarchical_namespace=true", "buckets[0].data_locations", "two regions", "false"),
    (GLOBAL, "buckets.0={name: one-bucket, location: us, versioning: true}", "buckets[0].versioning", "no such", "two"),
    (GLOBAL, "buckets.0.storage_class=RAPID", "buckets[0].storage_class", "refuse", "data_locations: [ZONE]"),
    (GLOBAL, "identity.researchers=[allUsers]", "identity.researchers[0]", "everybody on the internet", "group:"),
    (GLOBAL, "identity.operators=[allAuthenticatedUsers]", "identity.operators[0]", "everybody", "group:"),
    (GLOBAL, "identity.operators=[me@example.com]", "identity.operators[0]", "not a member", "KIND:NAME"),
    (GLOBAL, "identity.researchers=['domain:example.com']", "identity.researchers[0]", "could launch", "research@ex"),
    (GLOBAL, "identity.researchers=['group:a@example.com', 'group:b@example.org']", "identity.researchers[1]",
     "groups of one domain", "a group of example.com"),
    (GLOBAL, "budget.thresholds=[80]", "budget.thresholds[0]", "never be sent", "0.8"),
    (GLOBAL, "budget.billing_account=abc", "budget.billing_account", "pattern", ""),
    (REGION, "bucket.location=us-central1", "bucket.location", "would leave the region", "us-east5"),
    (REGION, "buckets=[{name: example-gkr-prod-us-east5}]", "buckets[0].name", "given twice", "remove one"),
    (REGION, "cluster.external_access=false", "cluster.external_access", "nobody could reach", "ranges"),
    (REGION, "cluster.authorized_ranges=[0.0.0.0/0]", "cluster.authorized_ranges[0]", "whole internet", "your own"),
    (REGION, "cluster.maintenance={window_hours: 4, recurrence: FREQ=WEEKLY;BYDAY=SA}", "cluster.maintenance",
     "leave 18 hours in 32 days", "BYDAY=SA,SU"),
    (REGION, "cluster.maintenance.recurrence=FREQ=WEEKLY;INTERVAL=2;BYDAY=SU", "cluster.maintenance",
     "the cluster would be refused", "more days"),
    (REGION, "cluster.addons.lustre=false", "lustre", "no driver", "cluster.addons.lustre: true"),
    (REGION, "lustre.scratch.zone=us-east5-b", "lustre[0].zone", "GPUs are in us-east5-a", "across zones"),
    (REGION, "lustre.scratch.capacity_gib=100000", "lustre[0].capacity_gib", "cannot be had", "90000 or 108000"),
    (REGION, "lustre.scratch.throughput=125", "lustre[0].capacity_gib", "cannot be had", "144000 or 216000"),
    (REGION, "lustre.scratch.capacity_gib=1000", "lustre[0].capacity_gib", "cannot be had", "write 18000"),
    (REGION, "syncer.bulk_port=7070", "syncer.bulk_port", "one of them only", "7071"),
    (REGION, "syncer.bulk_port=80", "syncer.bulk_port", "at least 1024", ""),
    (PLATFORM, "kueue.topology_levels=[kubernetes.io/hostname, rack]", "kueue.topology_levels", "not the node", "end"),
    (PLATFORM, "kueue.placement_level=rack", "kueue.placement_level", "wait forever", "gce-topology-block"),
    (PLATFORM, "kueue.queues.urgent.name=research", "kueue.queues[1]", "given twice", "remove one"),
    (PLATFORM, "kueue.queues=[]", "kueue.queues", "at least 1", ""),
    (PLATFORM, "namespaces=[a, a]", "namespaces[1]", "given twice", "remove one"),
    (PLATFORM, "kueue.queues.urgent.nodes.ultra-2=-1", "kueue.queues[1].nodes.ultra-2", "cannot be handed", "0 or"),
    (PLATFORM, "kueue.priorities={low: 1, high: 2}", "kueue.priorities", 'no priority "normal"', "add normal"),
    (PLATFORM, "kueue.priorities={low: 1, normal: 1, high: 2}", "kueue.priorities", "same number", "its own"),
    (PLATFORM, "kueue.wait_for_pods_ready=1s", "kueue.wait_for_pods_ready", "at least 60", ""),
    (PLATFORM, "site.bucket_env={AWS_SECRET_ACCESS_KEY: x}", "site.bucket_env.AWS_SECRET_ACCESS_KEY", "a secret",
     "bucket_secret"),
    (PLATFORM, "site.cpu_request_share=0", "site.cpu_request_share", "above 0", ""),
    (PLATFORM, "shared.services.judge.shared=true", "shared.services.judge", "an experiment's to say", "remove"),
    (PLATFORM, "shared.services={}", "shared.services", "at least 1", ""),
]  # fmt: skip


@pytest.mark.parametrize(("stack", "change", "path", "message", "hint"), CASES, ids=[case[1] for case in CASES])
def test_a_broken_rule_says_what_it_would_cause_and_what_to_write(
    stack: str, change: str, path: str, message: str, hint: str
) -> None:
    found = problems_of(stack, change)
    hits = [one for one in found if one.path == path and message in one.message]
    assert len(hits) == 1, "\n".join(str(one) for one in found)
    assert hint in hits[0].hint


def test_borrowing_without_a_cohort_is_refused() -> None:
    found = problems_of("prod.us-central1.platform", "kueue.queues.research.borrow_nodes={mega-1: 3}")
    assert [one.path for one in found] == ["kueue.queues[0].borrow_nodes"]
    assert problems_of(PLATFORM, "kueue.queues.research.borrow_nodes={ultra-2: 3}") == []


@pytest.mark.parametrize(
    ("stack", "change"),
    [
        (GLOBAL, "network.services_access=null"),
        (GLOBAL, "budget=null"),
        (GLOBAL, "buckets=[{name: fast, location: us-east5, data_locations: [us-east5-a], storage_class: RAPID}]"),
        (GLOBAL, "identity.operators=['principalSet://iam.googleapis.com/x']"),
        (REGION, "bucket.location=US-EAST5"),
        (REGION, "cluster={name: a, version: 1.34.1-gke.1829001, external_access: false, authorized_ranges: "
         "[10.9.0.0/24], addons: {lustre: true}}"),
        (REGION, "lustre=[]"),
        (PLATFORM, "kueue.wait_for_pods_ready=null"),
        (PLATFORM, "shared=null"),
    ],
)  # fmt: skip
def test_what_the_rules_leave_free(stack: str, change: str) -> None:
    assert problems_of(stack, change) == []
