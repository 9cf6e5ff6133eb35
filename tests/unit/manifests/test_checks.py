"""What cannot be rendered is refused with the numbers and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from manifests import pods
from manifests.checks import LARGEST_CONFIG_MAP, MOST_WORKER_GROUPS
from manifests.render import learner_objects, render, syncer_objects
from spec.errors import EXIT_CONFIG, ConfigError
from spec.plan import LearnerPlan, Plan
from tests.builders.experiments import LOCAL, laptop, resolved
from tests.builders.plans import cpu_run, digits, gke, mega_run, planned, ultra


def refused(plan: Plan) -> str:
    with pytest.raises(ConfigError) as caught:
        render(plan)
    assert caught.value.exit_code == EXIT_CONFIG
    assert caught.value.hint
    return str(caught.value)


def with_learner(plan: Plan, **update: object) -> Plan:
    first = plan.home.model_copy(update=update)
    return plan.model_copy(update={"learners": [first, *plan.learners[1:]]})


def groups(learner: LearnerPlan, count: int) -> dict[str, object]:
    [node] = learner.nodes[:1]
    return {"nodes": [node.model_copy(update={"name": f"g{n}-0", "group": f"g{n}"}) for n in range(count)]}


def test_a_local_plan_has_no_objects() -> None:
    assert "local backend" in refused(resolved(LOCAL, facts=laptop()))


def test_more_worker_groups_than_a_workload_holds() -> None:
    plan, most = cpu_run(), MOST_WORKER_GROUPS
    assert render(with_learner(plan, **groups(plan.home, most)))
    assert f"together {most + 1}; one job holds at most {most}" in refused(
        with_learner(plan, **groups(plan.home, most + 1))
    )


def test_services_count_as_groups() -> None:
    plan = digits()
    text = refused(with_learner(plan, **groups(plan.home, MOST_WORKER_GROUPS - 2)))
    assert "5 groups and 3 private services, together 8" in text


def test_a_group_called_like_a_services_pods() -> None:
    plan = digits()
    [node] = plan.home.nodes
    text = refused(with_learner(plan, nodes=[node.model_copy(update={"group": "svc-encoder"})]))
    assert '"svc-encoder"' in text
    assert "rename the group" in text


@pytest.mark.parametrize(("field", "word"), [("image", "no image"), ("queue", "no queue")])
def test_a_learner_without_image_or_queue(field: str, word: str) -> None:
    assert word in refused(with_learner(cpu_run(), **{field: None}))


def test_a_syncer_without_what_it_needs() -> None:
    plan = digits()
    assert plan.syncer is not None
    assert "syncer" in refused(plan.model_copy(update={"syncer": plan.syncer.model_copy(update={"image": None})}))


def test_nodes_of_one_group_that_differ() -> None:
    plan = ultra()
    nodes = [plan.home.nodes[0].model_copy(update={"cpu": 1.0}), *plan.home.nodes[1:]]
    assert "2 shapes" in refused(with_learner(plan, nodes=nodes))


def a3_high(nodes: int) -> Plan:
    text = f"""\
version: 1
name: high
image: trainer
cluster: us-east5
groups: [{{name: trainer, nodes: {nodes}, resources: {{gpu: H100:8}}}}]
run: python train.py
"""
    return planned(text, [gke("us-east5", pools={"a3-high": 4, "n2-standard-8": 1})])


def test_several_machines_whose_fabric_is_not_built() -> None:
    assert render(a3_high(1))
    assert "a3-high's fabric tcpx" in refused(a3_high(2))


def test_a_pod_that_would_miss_its_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change to the pods that puts another container first is refused before anything runs."""
    made = pods.pod_spec

    def with_another_first(*args: Any, containers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return made(*args, containers=[{"name": "proxy"}, *containers], **more)

    monkeypatch.setattr(pods, "pod_spec", with_another_first)
    assert render(cpu_run())
    assert "Ray's container is not the first" in refused(ultra())


def test_a_script_that_does_not_fit_a_config_map() -> None:
    plan = mega_run()
    rest = sum(len(text.encode()) for text in render(plan)["us-central1"][1]["data"].values())
    script = "#" + "ü" * (LARGEST_CONFIG_MAP // 4)  # twice: in plan.json and as run.sh
    text = refused(plan.model_copy(update={"run_script": script}))
    assert str(LARGEST_CONFIG_MAP) in text
    assert "run.sh" in text or "plan.json" in text
    smaller = "#" + "x" * ((LARGEST_CONFIG_MAP - rest) // 2 - 100)
    assert render(plan.model_copy(update={"run_script": smaller}))


def test_the_largest_learner_we_mean_to_run_fits() -> None:
    plan = ultra()
    node = plan.home.group("front")[0]
    nodes = [node.model_copy(update={"name": f"front-{index}"}) for index in range(1250)]
    [job] = [one for one in learner_objects(with_learner(plan, nodes=nodes), with_learner(plan, nodes=nodes).home)
             if one["kind"] == "RayJob"]  # fmt: skip
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 1250


def test_a_run_without_a_syncer_has_none() -> None:
    assert syncer_objects(mega_run()) == []
