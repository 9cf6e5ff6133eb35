"""What can never be admitted, and nothing more than that."""

from __future__ import annotations

from typing import Any

import pytest

from gkr.cluster.quota import Flavor, PodSet, flavors, never_fits, pod_sets

H200 = {"accelerator": "h200"}


def _queue(name: str, quotas: dict[str, dict[str, str]], **entry: str) -> dict[str, Any]:
    groups = [
        {
            "flavors": [
                {
                    "name": flavor,
                    "resources": [{"name": key, "nominalQuota": text, **entry} for key, text in one.items()],
                }
                for flavor, one in quotas.items()
            ]
        }
    ]
    return {"metadata": {"name": name}, "spec": {"resourceGroups": groups}}


def _pods(name: str, count: int, labels: dict[str, str] | None = None, **requests: float) -> PodSet:
    return PodSet(name, count, requests, {key: frozenset({value}) for key, value in (labels or {}).items()})


def test_amounts_of_a_rendered_job_are_requests_else_limits() -> None:
    def template(**resources: Any) -> dict[str, Any]:
        return {"spec": {"containers": [{"resources": resources}], "nodeSelector": {"zone": "a"}}}

    job = {
        "spec": {
            "rayClusterSpec": {
                "headGroupSpec": {"template": template(requests={"cpu": "500m"}, limits={"memory": "2Gi"})},
                "workerGroupSpecs": [{"groupName": "w", "replicas": 3, "template": template(limits={"gpu": "8"})}],
            }
        }
    }
    head, workers = pod_sets(job)
    assert (head.count, dict(head.requests)) == (1, {"cpu": 0.5, "memory": 2.0 * 2**30})
    assert (workers.name, workers.count, dict(workers.requests)) == ("w", 3, {"gpu": 8.0})
    assert workers.labels == {"zone": frozenset({"a"})}


@pytest.mark.parametrize(
    ("pods", "reason"),
    [
        ([_pods("w", 8, H200, gpu=8)], ""),
        ([_pods("w", 9, H200, gpu=8)], "group w asks for 72 gpu (9 x 8) on nodes with accelerator=h200"),
        ([_pods("w", 1, {"accelerator": "b200"}, gpu=8)], "has no flavor with such nodes"),
        ([_pods("a", 5, H200, gpu=8), _pods("b", 5, H200, gpu=8)], "80 gpu in all, and queue q never has more than 64"),
        ([_pods("w", 1, H200, tpu=1)], "never has more than 0"),
    ],
)
def test_upper_bound_by_group_flavor_and_total(pods: list[PodSet], reason: str) -> None:
    problems = never_fits(pods, offered=[Flavor("h200", {"gpu": 64}, H200)], queue="q")
    assert len(problems) == (1 if reason else 0)
    assert reason in "".join(problems)


def test_what_may_be_borrowed_from_the_cohort_counts() -> None:
    own = _queue("own", {"h200": {"gpu": "16"}})
    lender = _queue("lender", {"h200": {"gpu": "64"}}, lendingLimit="32")
    limited = _queue("own", {"h200": {"gpu": "16"}}, borrowingLimit="8")
    known = [{"metadata": {"name": "h200"}, "spec": {"nodeLabels": H200}}]
    assert flavors(own, known=known) == [Flavor("h200", {"gpu": 16}, H200)]
    assert flavors(own, known=known, cohort=[own, lender]) == [Flavor("h200", {"gpu": 48}, H200)]
    assert flavors(limited, known=known, cohort=[limited, lender]) == [Flavor("h200", {"gpu": 24}, H200)]
