"""Queues over pools, as Kueue is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from infra.components.k8s.queues import Holdings, local_queues, queue_objects
from infra.facts import RegionFacts
from spec.errors import ConfigError
from spec.facts import MachinePool
from spec.machines import machine
from spec.stack_platform import Chart, Kueue, Queue
from tools.bed import facts as bed_facts
from tools.bed import kueue as bed_kueue

GIB = 2**30
NAMESPACES = ("gkr-0", "gkr-1")


def region(**nodes: int) -> RegionFacts:
    rows = {"cpu": "n2-standard-32", "mega": "a3-mega", "ultra": "a3-ultra", "more": "a3-ultra"}
    pools = [MachinePool(name=name, machine=rows[name], nodes=count) for name, count in nodes.items()]
    return RegionFacts(name="us-east5", region="us-east5", pools=pools, bucket="gs://b", registry="r")


def kueue(*queues: Queue, **more: Any) -> Kueue:
    return Kueue(chart=Chart(source="oci://charts/kueue", version="0.17.0"), queues=list(queues), **more)


def rendered(config: Kueue, facts: RegionFacts, *, holdings: Holdings | None = None) -> list[dict[str, Any]]:
    objects = queue_objects(config, region=facts, holdings=holdings or {})
    return [*objects, *local_queues(config, namespaces=NAMESPACES)]


def of(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def identity(one: dict[str, Any]) -> tuple[str, str, str]:
    return one["kind"], one["metadata"]["name"], one["metadata"].get("namespace", "")


def quota(queue: dict[str, Any], flavor: str, resource: str, field: str = "nominalQuota") -> str | None:
    [group] = queue["spec"]["resourceGroups"]
    [found] = [one for one in group["flavors"] if one["name"] == flavor]
    [amount] = [one for one in found["resources"] if one["name"] == resource]
    return amount.get(field)


def test_a_platform_tells_kueue_what_the_test_bed_tells_it() -> None:
    """The bed's queues were run against the real Kueue; those of a stack are the same objects."""
    facts = RegionFacts(
        name="bed-a", region="bed-a", bucket="s3://gkr", registry="localhost/gkr",
        pools=[
            MachinePool(name="cpu", machine="local-cpu", nodes=16, cpu=2, memory=8 * GIB),
            MachinePool(name="a3-mega", machine="a3-mega", nodes=3),
            MachinePool(name="a3-ultra", machine="a3-ultra", nodes=4),
        ],
    )  # fmt: skip
    config = kueue(Queue(name="research", nodes={"cpu": 16, "a3-mega": 3, "a3-ultra": 4}))
    real = {"cpu": "2", "memory": str(8 * GIB), "ephemeral-storage": str(100 * GIB)}
    expected = bed_kueue.queues(
        {"a3-mega": 3, "a3-ultra": 4}, real=real, namespaces=NAMESPACES, selector=bed_facts.MANAGED
    )
    ours = rendered(config, facts)
    assert sorted(ours, key=identity) == sorted(expected, key=identity)


def test_gpu_flavors_come_first_and_carry_their_taint() -> None:
    objects = rendered(kueue(Queue(name="research", nodes={"cpu": 2, "ultra": 3})), region(cpu=4, ultra=3))
    queue = of(objects, "ClusterQueue")["research"]
    assert [one["name"] for one in queue["spec"]["resourceGroups"][0]["flavors"]] == ["ultra", "cpu"]
    flavors = of(objects, "ResourceFlavor")
    assert flavors["ultra"]["spec"]["nodeTaints"] == [bed_kueue.GPU_TAINT]
    assert "nodeTaints" not in flavors["cpu"]["spec"]
    assert all("tolerations" not in one["spec"] for one in flavors.values())


def test_two_pools_of_one_machine_are_told_apart_by_their_own_label() -> None:
    objects = rendered(kueue(Queue(name="research", nodes={"ultra": 1, "more": 1})), region(cpu=1, ultra=1, more=1))
    labels = {name: one["spec"]["nodeLabels"] for name, one in of(objects, "ResourceFlavor").items()}
    assert labels["ultra"] != labels["more"]
    assert labels["more"]["cloud.google.com/gke-nodepool"] == "more"


def test_a_queue_hands_out_its_nodes_and_no_more() -> None:
    objects = rendered(
        kueue(Queue(name="research", nodes={"ultra": 3}), Queue(name="urgent", nodes={"ultra": 1})), region(ultra=4)
    )
    queues = of(objects, "ClusterQueue")
    assert quota(queues["research"], "ultra", "nvidia.com/gpu") == "24"
    assert quota(queues["urgent"], "ultra", "nvidia.com/gpu") == "8"
    assert quota(queues["urgent"], "ultra", "cpu") == str(int(machine("a3-ultra").allocatable_cpu))
    local = [one["metadata"] for one in objects if one["kind"] == "LocalQueue"]
    assert len(local) == len(NAMESPACES) * 2


def test_queues_of_a_cohort_borrow_within_their_limit_and_get_theirs_back() -> None:
    first = Queue(name="research", nodes={"ultra": 3}, cohort="all")
    second = Queue(name="urgent", nodes={"ultra": 1}, cohort="all", borrow_nodes={"ultra": 2}, preempt_lower=False)
    objects = rendered(kueue(first, second), region(ultra=4))
    queues = of(objects, "ClusterQueue")
    assert quota(queues["urgent"], "ultra", "nvidia.com/gpu", "borrowingLimit") == "16"
    assert quota(queues["research"], "ultra", "nvidia.com/gpu", "borrowingLimit") is None
    assert queues["urgent"]["spec"]["cohortName"] == "all"
    assert queues["urgent"]["spec"]["preemption"] == {"reclaimWithinCohort": "Any", "withinClusterQueue": "Never"}
    assert list(of(objects, "Cohort")) == ["all"]


def test_what_the_platform_holds_is_taken_from_the_first_queue_that_has_such_machines() -> None:
    held = {"H200": {"cpu": 16.5, "memory": 128.0 * GIB, "nvidia.com/gpu": 2.0}, "": {"cpu": 8.0, "memory": 4.0 * GIB}}
    config = kueue(Queue(name="small", nodes={"cpu": 1}), Queue(name="research", nodes={"cpu": 1, "ultra": 2}))
    queues = of(rendered(config, region(cpu=2, ultra=2), holdings=held), "ClusterQueue")
    assert quota(queues["research"], "ultra", "nvidia.com/gpu") == "14"
    assert quota(queues["research"], "ultra", "cpu") == "423500m"
    assert quota(queues["small"], "cpu", "cpu") == "22"
    assert quota(queues["research"], "cpu", "cpu") == "30"


def test_shared_services_that_do_not_fit_are_refused_with_the_numbers() -> None:
    held = {"H200": {"nvidia.com/gpu": 9.0}}
    with pytest.raises(ConfigError) as refused:
        rendered(kueue(Queue(name="research", nodes={"ultra": 1})), region(ultra=1), holdings=held)
    assert "hold 9 nvidia.com/gpu of a3-ultra" in refused.value.message
    assert "hands out 8" in refused.value.message


def test_a_pool_that_the_region_does_not_have_is_refused_with_the_near_one() -> None:
    with pytest.raises(ConfigError) as refused:
        rendered(kueue(Queue(name="research", nodes={"ultar": 1})), region(ultra=1))
    assert "ultar" in refused.value.message
    assert "ultra" in refused.value.hint


@pytest.mark.parametrize(("there", "research", "urgent"), [(0, "0", "0"), (2, "16", "0"), (4, "24", "8")])
def test_nobody_is_admitted_to_machines_that_are_not_there_yet(there: int, research: str, urgent: str) -> None:
    """Queues of an undelivered reservation are written before it comes; its flavor is there, and empty."""
    queues = Queue(name="research", nodes={"ultra": 3}), Queue(name="urgent", nodes={"ultra": 1})
    found = of(rendered(kueue(*queues), region(ultra=there)), "ClusterQueue")
    assert quota(found["research"], "ultra", "nvidia.com/gpu") == research
    assert quota(found["urgent"], "ultra", "nvidia.com/gpu") == urgent


def test_no_topology_where_it_is_switched_off_or_no_machine_has_gpus() -> None:
    off = rendered(kueue(Queue(name="research", nodes={"ultra": 1}), topology=False), region(ultra=1))
    cpu = rendered(kueue(Queue(name="research", nodes={"cpu": 1})), region(cpu=1))
    assert of(off, "Topology") == of(cpu, "Topology") == {}
    assert "topologyName" not in of(off, "ResourceFlavor")["ultra"]["spec"]


def test_a_job_on_machines_that_come_on_request_is_admitted_when_its_request_is_granted() -> None:
    """Nothing else makes the nodes of a queued pool: admitted at once, its pods would wait for ever."""
    facts = region(cpu=2, ultra=3, more=2).model_copy(update={"queued": {"more": 86_400}})
    objects = rendered(kueue(Queue(name="research", nodes={"cpu": 2, "ultra": 3, "more": 2})), facts)
    queue = of(objects, "ClusterQueue")["research"]["spec"]
    [check] = queue["admissionChecksStrategy"]["admissionChecks"]
    assert check == {"name": "more", "onFlavors": ["more"]}
    parameters = of(objects, "AdmissionCheck")["more"]["spec"]["parameters"]
    asked = of(objects, parameters["kind"])[parameters["name"]]["spec"]
    assert asked == {
        "managedResources": ["nvidia.com/gpu"],
        "parameters": {"maxRunDurationSeconds": "86400"},
        "provisioningClassName": "queued-provisioning.gke.io",
    }
    flavors = of(objects, "ResourceFlavor")
    assert [one["key"] for one in flavors["more"]["spec"]["tolerations"]] == ["cloud.google.com/gke-queued"]
    assert "tolerations" not in flavors["ultra"]["spec"]


def test_machines_that_are_there_need_no_request() -> None:
    objects = rendered(kueue(Queue(name="research", nodes={"ultra": 3})), region(cpu=2, ultra=3))
    assert not of(objects, "AdmissionCheck")
    assert "admissionChecksStrategy" not in of(objects, "ClusterQueue")["research"]["spec"]
