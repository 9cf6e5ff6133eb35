"""Rules that every rendered object keeps, over all cases."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from manifests import labels, names
from manifests.rayjob import RAY_VERSION
from manifests.render import APPLY_ORDER, learner_objects, render, syncer_objects
from spec.machines import machine
from spec.plan import Plan
from tests.builders.plans import CASES, SUBBLOCK, bed, digits, mega_run, planned, pod_templates, portrait, ultra

PLANS = {name: make() for name, make in CASES.items()}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def objects_of(plan: Plan, kind: str = "") -> list[dict[str, Any]]:
    return [one for found in render(plan).values() for one in found if kind in {"", one["kind"]}]


def templates(plan: Plan, role: str = "") -> list[dict[str, Any]]:
    return [one for one in pod_templates(objects_of(plan)) if role in {"", one["metadata"]["labels"][labels.ROLE]}]


def first_container(template: dict[str, Any]) -> dict[str, Any]:
    return template["spec"]["containers"][0]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def affinity(template: dict[str, Any]) -> dict[str, Any]:
    node = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = node["nodeSelectorTerms"]
    [expression] = term["matchExpressions"]
    return expression


def selects(selector: dict[str, str], template: dict[str, Any]) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


@each_plan
def test_the_same_plan_gives_the_same_objects(plan: Plan) -> None:
    assert json.dumps(render(plan)) == json.dumps(render(Plan.read_json(plan.write_json())))


@each_plan
def test_objects_come_in_the_order_in_which_they_are_applied(plan: Plan) -> None:
    for found in render(plan).values():
        order = [APPLY_ORDER.index(one["kind"]) for one in found]
        assert order == sorted(order)
        seen = [(one["kind"], one["metadata"]["namespace"], one["metadata"]["name"]) for one in found]
        assert len(set(seen)) == len(seen)


@each_plan
def test_the_whole_is_its_learners_and_its_syncer(plan: Plan) -> None:
    parts = [*(one for learner in plan.learners for one in learner_objects(plan, learner)), *syncer_objects(plan)]
    assert sorted(map(json.dumps, parts)) == sorted(map(json.dumps, objects_of(plan)))


@each_plan
def test_everything_is_labelled_and_names_the_plan_it_came_from(plan: Plan) -> None:
    digest = hashlib.sha256(plan.write_json().encode()).hexdigest()
    for one in [*objects_of(plan), *templates(plan)]:
        own = one["metadata"]["labels"]
        assert own[labels.EXPERIMENT] == plan.experiment
        assert own[labels.RUN] == plan.run
        assert own[labels.MANAGED_BY] == "gkr"
        assert one["metadata"]["annotations"][labels.PLAN_SHA256] == digest
    for template in templates(plan):
        own = template["metadata"]["labels"]
        assert (labels.LEARNER in own) == (own[labels.ROLE] != names.SYNCER)
        assert own[labels.GROUP]


@each_plan
def test_pods_read_the_very_plan_and_the_very_command(plan: Plan) -> None:
    for one in objects_of(plan, "ConfigMap"):
        assert Plan.read_json(one["data"]["plan.json"]) == plan
        assert one["data"].get("run.sh") == plan.run_script
        assert one["immutable"] is True


@each_plan
def test_no_value_of_a_secret_is_rendered(plan: Plan) -> None:
    text = json.dumps(render(plan))
    assert "never shown" not in text
    assert not objects_of(plan, "Secret")


def test_secrets_are_referred_to_by_name() -> None:
    for template in templates(portrait(), names.TRAINER):
        container = first_container(template)
        learner = template["metadata"]["labels"][labels.LEARNER]
        assert {"secretRef": {"name": "hf-token"}} in container["envFrom"]
        [key] = [one for one in container["env"] if one["name"] == "WANDB_API_KEY"]
        assert key["valueFrom"] == {
            "secretKeyRef": {"key": "WANDB_API_KEY", "name": f"portrait-2b-{learner}-3fa9c1-env"}
        }
    assert "WANDB" not in json.dumps(templates(portrait(), names.SYNCER))


@each_plan
def test_a_rayjob_is_one_that_kueue_and_kuberay_take(plan: Plan) -> None:
    jobs = objects_of(plan, "RayJob")
    assert len(jobs) == len(plan.learners)
    for one in jobs:
        own, spec = one["metadata"]["labels"], one["spec"]
        assert own[labels.QUEUE] == "research"
        assert own[labels.PRIORITY] == plan.priority
        assert spec["submissionMode"] == "HTTPMode"
        assert spec["shutdownAfterJobFinishes"] is True
        assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (0, 0)
        assert not {"deletionStrategy", "suspend", "submitterPodTemplate", "clusterSelector"} & spec.keys()
        assert "enableInTreeAutoscaling" not in spec["rayClusterSpec"]
        for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
            assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] > 0
            assert group["groupName"] != "head"


@each_plan
def test_only_learners_stand_in_a_queue(plan: Plan) -> None:
    for one in [*objects_of(plan), *templates(plan)]:
        assert (labels.QUEUE in one["metadata"]["labels"]) == (one.get("kind") == "RayJob")


def test_deadlines_are_the_plans() -> None:
    [job] = objects_of(ultra(), "RayJob")
    assert job["spec"]["preRunningDeadlineSeconds"] == 5400
    assert job["spec"]["activeDeadlineSeconds"] == 2 * 86400
    assert {one["spec"]["terminationGracePeriodSeconds"] for one in templates(ultra())} == {90}


@each_plan
def test_worker_groups_are_the_plans_groups_and_private_services(plan: Plan) -> None:
    for learner, job in zip(plan.learners, objects_of(plan, "RayJob"), strict=True):
        found = {
            group["groupName"]: (group["replicas"], ray_resources(group))
            for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        }
        wanted = {name: (len(learner.group(name)), {f"gkr_group_{name}": 1}) for name in learner.groups}
        wanted |= {
            f"svc-{one.name}": (one.replicas, {f"gkr_service_{one.name}": 1})
            for one in learner.services
            if not one.shared_endpoints
        }
        assert found == wanted


def ray_resources(group: dict[str, Any]) -> dict[str, float]:
    """As Ray reads them after the operator has pasted them into a line of bash."""
    line = f" --resources={group['rayStartParams']['resources']} "
    [word] = shlex.split(line)
    return json.loads(word.removeprefix("--resources="))


@each_plan
def test_requests_are_limits_but_for_cores(plan: Plan) -> None:
    for template in templates(plan):
        wants = first_container(template)["resources"]
        assert wants["requests"].pop("cpu")
        assert wants["requests"] == wants["limits"]
        assert "memory" in wants["limits"]


def test_a_whole_machine_is_asked_for_no_more_than_it_has() -> None:
    for template in templates(portrait(), names.TRAINER):
        gpu = "a3-ultra" if template["metadata"]["labels"][labels.LEARNER] == "east" else "a3-mega"
        row, wants = machine(gpu), first_container(template)["resources"]
        assert wants["limits"] == {"memory": f"{row.allocatable_memory_gib}Gi", "nvidia.com/gpu": "8"}
        assert wants["requests"]["cpu"] == f"{row.allocatable_cpu:g}"


def test_on_a_shared_machine_cores_are_requested_in_part_and_ray_has_memory_of_its_own() -> None:
    for template in templates(digits(), names.TRAINER):
        assert first_container(template)["resources"]["requests"] == {"cpu": "100m", "memory": "2560Mi"}
    for template in templates(digits(), names.SERVICE):
        assert first_container(template)["resources"]["requests"] == {"cpu": "25m", "memory": "1536Mi"}
    for job in objects_of(digits(), "RayJob"):
        groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        assert {group["rayStartParams"]["num-cpus"] for group in groups} == {"1"}


@each_plan
def test_gpu_pods_name_their_accelerator_and_others_stay_off_gpu_nodes(plan: Plan) -> None:
    key = "cloud.google.com/gke-accelerator"
    for template in templates(plan):
        wants, expression = first_container(template)["resources"]["limits"], affinity(template)
        has_gpus = "nvidia.com/gpu" in wants
        assert has_gpus == any(one["key"] == "nvidia.com/gpu" for one in template["spec"].get("tolerations", []))
        if has_gpus:
            assert (expression["key"], expression["operator"]) == (key, "In")
            assert expression["values"][0].startswith("nvidia-")
        elif template["metadata"]["labels"][labels.ROLE] != names.TRAINER or plan.experiment == "digits":
            assert expression == {"key": key, "operator": "DoesNotExist"}
        else:
            assert expression["key"] == "node.kubernetes.io/instance-type"


def test_every_gpu_pod_set_has_a_topology_request_and_no_other_has() -> None:
    # Kueue offers a pod set without one no flavor that has a topology.
    for template in templates(portrait()):
        own, role = template["metadata"]["annotations"], template["metadata"]["labels"][labels.ROLE]
        found = {key: value for key, value in own.items() if key.startswith("kueue.x-k8s.io/")}
        gpus = "nvidia.com/gpu" in first_container(template)["resources"]["limits"]
        if role == names.TRAINER:
            assert found == {"kueue.x-k8s.io/podset-preferred-topology": SUBBLOCK}
        else:
            assert found == ({"kueue.x-k8s.io/podset-unconstrained-topology": "true"} if gpus else {})


def test_a_command_with_services_of_its_own_has_keys_and_a_command_alone_has_none() -> None:
    """Then its replicas hear their run only, as those of a training run do."""
    services = "services:\n  judge: {kind: evaluate}\n"
    text = "version: 1\nname: own\ngroups: [{nodes: 1, resources: {cpu: 1, memory: 1Gi}}]\nrun: python ask.py\n"
    alone, asking = planned(text, [bed()]), planned(text + services, [bed()])
    assert (alone.has_keys, asking.has_keys) == (False, True)
    for plan in (alone, asking):
        for template in templates(plan):
            environment = variables(first_container(template))
            assert (environment.get("GKR_SYNC_KEYS") == names.KEYS_DIR) == plan.has_keys
            secrets = [one["secret"]["secretName"] for one in template["spec"]["volumes"] if "secret" in one]
            assert secrets == [names.keys_secret(plan.home.job)] * plan.has_keys
            assert ("securityContext" in template["spec"]) == plan.has_keys


def test_who_asks_the_platforms_services_gets_their_token_and_nobody_else() -> None:
    for learner in portrait().learners:
        asks = any(one.shared_endpoints for one in learner.services)
        for template in pod_templates(learner_objects(portrait(), learner)):
            secrets = [one["secret"]["secretName"] for one in template["spec"]["volumes"] if "secret" in one]
            assert ("gkr-services" in secrets) == asks
            environment = variables(first_container(template))
            assert environment.get("GKR_SHARED_KEYS") == (names.SHARED_KEYS_DIR if asks else None)


def test_the_metrics_of_a_replica_are_where_collection_asks_for_them() -> None:
    for template in templates(ultra()):
        ports = {one["name"]: one["containerPort"] for one in first_container(template).get("ports", [])}
        replica = template["metadata"]["labels"][labels.ROLE] == names.SERVICE
        assert (ports.get(names.METRICS_PORT_NAME) == names.METRICS_PORT) == replica
        assert (variables(first_container(template)).get("GKR_METRICS_PORT") == f"{names.METRICS_PORT}") == replica


@each_plan
def test_no_pod_is_privileged_or_on_the_hosts_network(plan: Plan) -> None:
    for template in templates(plan):
        spec = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert "privileged" not in container["securityContext"]


@each_plan
def test_every_mount_has_a_volume_and_no_path_is_mounted_twice(plan: Plan) -> None:
    for template in templates(plan):
        spec = template["spec"]
        volumes = [one["name"] for one in spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        used: set[str] = set()
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            paths = [one["mountPath"] for one in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)
            used |= {one["name"] for one in container["volumeMounts"]}
        assert used == set(volumes)


@each_plan
def test_ray_is_the_first_container_and_its_command_is_ours(plan: Plan) -> None:
    for template in templates(plan):
        container = first_container(template)
        if template["metadata"]["labels"][labels.ROLE] == names.SYNCER:
            assert container["command"] == ["bash", "/gkr/plan/syncer.sh"]
            continue
        assert container["name"] == "ray"
        assert container["command"] == ["bash", "/gkr/plan/start.sh"]
        assert template["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


@each_plan
def test_no_pod_of_a_learner_can_be_evicted_for_convenience(plan: Plan) -> None:
    for learner, budget in zip(plan.learners, objects_of(plan, "PodDisruptionBudget"), strict=True):
        chosen = budget["spec"]["selector"]["matchLabels"]
        [job] = [one for one in objects_of(plan, "RayJob") if one["metadata"]["name"] == learner.job]
        pods = 1 + sum(group["replicas"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"])
        assert budget["spec"]["minAvailable"] == pods
        for template in templates(plan):
            mine = template["metadata"]["labels"].get(labels.LEARNER) == learner.name
            assert selects(chosen, template) == mine


@each_plan
def test_each_pod_stands_behind_one_policy_for_what_comes_in(plan: Plan) -> None:
    policies = objects_of(plan, "NetworkPolicy")
    for template in templates(plan):
        mine = [one for one in policies if selects(one["spec"]["podSelector"]["matchLabels"], template)]
        assert len(mine) == 1
        assert mine[0]["spec"]["policyTypes"] == ["Ingress"]
        assert mine[0]["spec"]["ingress"]


def test_a_syncer_is_reached_by_its_run_alone_unless_learners_come_from_another_cluster() -> None:
    for clusters, open_to_addresses in ((1, False), (2, True)):
        plan = digits(clusters)
        [policy] = [one for one in objects_of(plan, "NetworkPolicy") if one["metadata"]["name"].endswith("syncer")]
        [rule] = policy["spec"]["ingress"]
        assert [one["port"] for one in rule["ports"]] == [7070, 7071]
        assert ("from" not in rule) == open_to_addresses
        [service] = objects_of(plan, "Service")
        assert service["spec"].get("externalIPs") == (["10.202.0.1"] if open_to_addresses else None)
        assert {one["port"] for one in service["spec"]["ports"]} == {7070, 7071}
        assert sum(selects(service["spec"]["selector"], template) for template in templates(plan)) == 1


def test_learners_find_the_syncer_where_their_plan_says() -> None:
    plan = digits()
    [service] = objects_of(plan, "Service")
    own = service["metadata"]
    for learner in plan.learners:
        host, port = learner.syncer_control.rsplit(":", 1)
        assert host.split(".")[:2] == [own["name"], own["namespace"]]
        assert int(port) in {one["port"] for one in service["spec"]["ports"]}


def test_a_site_with_an_account_gets_none_and_pods_use_it() -> None:
    plan = portrait()
    found = [one["metadata"]["name"] for one in objects_of(plan, "ServiceAccount")]
    assert found == ["portrait-2b-central-3fa9c1"]
    accounts = {one["spec"]["serviceAccountName"] for one in templates(plan)}
    assert accounts == {"trainer", "portrait-2b-central-3fa9c1"}


def test_code_is_fetched_before_ray_starts_with_nothing_but_the_bucket() -> None:
    for template in templates(mega_run()):
        init = template["spec"]["initContainers"][-1]
        assert init["command"] == ["python", "-m", "training.fetch_code"]
        assert "hf-token" not in json.dumps(init)
        assert variables(init)["GKR_CODE_DIR"] == first_container(template)["workingDir"] == "/gkr/code"
    assert "fetch_code" not in json.dumps(render(digits()))


@each_plan
def test_a_pod_knows_who_it_is(plan: Plan) -> None:
    for template in templates(plan):
        own, found = template["metadata"]["labels"], variables(first_container(template))
        assert (found["GKR_ROLE"], found["GKR_GROUP"]) == (own[labels.ROLE], own[labels.GROUP])
        assert found.get("GKR_LEARNER") == own.get(labels.LEARNER)
        assert (found["GKR_PLAN"], found["GKR_RUN_DIR"]) == ("/gkr/plan/plan.json", "/gkr/run")


def test_a_caller_may_change_what_it_got() -> None:
    first = render(digits())
    templates_of_first = pod_templates(first["bed"])
    templates_of_first[0]["spec"]["containers"][0]["env"].clear()
    assert templates_of_first[1]["spec"]["containers"][0]["env"]
    assert render(digits())["bed"] != first["bed"]


def test_kuberay_is_told_about_the_ray_that_the_images_have() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert set(re.findall(r"ray\[default\]==([\d.]+)", text)) == {RAY_VERSION}
