from __future__ import annotations

from gkr.cluster.queues import read_queues
from tests.builders.kube_objects import (
    cluster_queue,
    is_true,
    local_queue,
    pending,
    pod_set,
    workload,
)  # fmt: skip

HELD = {"trainer": {"a3-ultra": {"nvidia.com/gpu": "512", "cpu": "1408"}}}


def test_holders_and_waiters_with_kueues_own_order() -> None:
    holds = workload("rayjob-big-ca6905-f2769", sets=[pod_set(count=64)], admitted=HELD)
    old = workload(
        "old",
        sets=[pod_set(count=2, experiment="old", run="r1")],
        conditions=pending("full"),
        created="2026-11-30T10:00:00Z",
    )
    new = workload(
        "new", sets=[pod_set(count=1, experiment="new", run="r2")], conditions=pending("full"), namespace="gkr-1"
    )
    over = workload("over", sets=[pod_set(count=1)], conditions=is_true("Finished"))
    order = [{"metadata": {"name": "new", "namespace": "gkr-1"}}, {"metadata": {"name": "old", "namespace": "gkr-0"}}]
    queues = [local_queue(), local_queue(namespace="gkr-1")]
    (found,) = read_queues(
        [cluster_queue()], local_queues=queues, workloads=[old, new, holds, over], pending={"research": order}
    )
    assert [(one.who, one.gpus, one.admitted is not None) for one in found.holding] == [
        ("big (20261130-181727-ca6905)", 512, True)
    ]
    assert [(one.who, one.gpus, one.position, one.reason) for one in found.waiting] == [
        ("new (r2)", 8, 1, "full"), ("old (r1)", 16, 2, "full"),
    ]  # fmt: skip
    gpu = next(one for one in found.quotas if one.flavor == "a3-ultra" and one.resource == "nvidia.com/gpu")
    assert (gpu.nominal, gpu.used, gpu.free) == (512, 512, 0)


def test_without_kueues_order_priority_comes_first_and_then_age() -> None:
    low = workload("low", sets=[pod_set(count=1)], created="2026-11-30T10:00:00Z", priority=-100)
    late = workload("late", sets=[pod_set(count=1)], created="2026-11-30T12:00:00Z")
    early = workload("early", sets=[pod_set(count=1)], created="2026-11-30T11:00:00Z")
    (found,) = read_queues([cluster_queue()], local_queues=[local_queue()], workloads=[low, late, early], pending={})
    assert [one.name for one in found.waiting] == ["early", "late", "low"]
    assert [one.position for one in found.waiting] == [None, None, None]


def test_a_queue_that_takes_nobody_says_why() -> None:
    (found,) = read_queues(
        [cluster_queue(active=False)], local_queues=[local_queue(active=False)], workloads=[], pending={}
    )
    assert not found.active
    assert found.message == "Can't admit new workloads: is stopped."
    assert found.local == {"gkr-0/research": "Can submit new workloads to localQueue"}
