"""Every object against the schemas of the pinned versions: KubeRay's CRDs, the API server's own, and what their sources
say about the rules that we keep. Needs the modules that the tools are built from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests import checks, names, rayjob
from manifests.render import render
from tests.builders.plans import CASES
from tests.builders.structural import problems
from tools.binaries import module_folder

pytestmark = pytest.mark.cluster

_FILES = {
    "v1": "api__v1", "batch/v1": "apis__batch__v1", "networking.k8s.io/v1": "apis__networking.k8s.io__v1",
    "policy/v1": "apis__policy__v1",
}  # fmt: skip


@pytest.fixture(scope="module")
def kuberay() -> Path:
    return module_folder("kuberay", "github.com/ray-project/kuberay/ray-operator")


@pytest.fixture(scope="module")
def kueue() -> Path:
    return module_folder("kueue", "sigs.k8s.io/kueue")


@pytest.fixture(scope="module")
def kubernetes() -> Path:
    return module_folder("kubernetes", "k8s.io/kubernetes")


@pytest.fixture(scope="module")
def rayjob_schema(kuberay: Path) -> dict[str, Any]:
    text = (kuberay / "config" / "crd" / "bases" / "ray.io_rayjobs.yaml").read_text()
    crd = yaml.load(text, Loader=yaml.CSafeLoader)
    [version] = [one for one in crd["spec"]["versions"] if one["name"] == rayjob.API_VERSION.rsplit("/", 1)[1]]
    return version["schema"]["openAPIV3Schema"]


@pytest.fixture(scope="module")
def definitions(kubernetes: Path) -> dict[str, dict[str, Any]]:
    folder = kubernetes / "api" / "openapi-spec" / "v3"
    return {
        version: json.loads((folder / f"{name}_openapi.json").read_text())["components"]["schemas"]
        for version, name in _FILES.items()
    }


def core_schema(one: dict[str, Any], definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    group, _, version = one["apiVersion"].rpartition("/")
    wanted = {"group": group, "kind": one["kind"], "version": version}
    schemas = definitions[one["apiVersion"]].values()
    return next(schema for schema in schemas if wanted in schema.get("x-kubernetes-group-version-kind", []))


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_object_is_one_that_the_api_server_takes_whole(
    case: str, rayjob_schema: dict[str, Any], definitions: dict[str, dict[str, Any]]
) -> None:
    for found in render(CASES[case]()).values():
        for one in found:
            if one["kind"] == "RayJob":
                assert list(problems(one, rayjob_schema)) == []
            else:
                schema = core_schema(one, definitions)
                assert list(problems(one, schema, definitions=definitions[one["apiVersion"]])) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("spec", "shutDownAfterJobFinishes"), True, "unknown field"),
        (("spec", "backoffLimit"), "0", "not of type integer"),
        (("spec", "activeDeadlineSeconds"), 2**31, "more than 32 bits"),
        (("spec", "preRunningDeadlineSeconds"), 0, "out of range"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens", "not one of"),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "tolerance"), [], "unknown field"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0, "not of type string"),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec"), {}, "containers is missing"),
        (("spec", "entrypoint"), None, "null"),
    ],
)
def test_the_validator_finds_what_is_wrong(
    path: tuple[str, ...], value: Any, expected: str, rayjob_schema: dict[str, Any]
) -> None:
    [job] = [one for one in render(CASES["cpu-run"]())["us-east5"] if one["kind"] == "RayJob"]
    target = job
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    [found] = problems(job, rayjob_schema)
    assert found.startswith(".".join(path))
    assert expected in found


def test_the_validator_goes_to_the_bottom_of_a_pod(definitions: dict[str, dict[str, Any]]) -> None:
    [job] = [one for one in render(CASES["digits-one-bed"]())["bed"] if one["kind"] == "Job"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["ports"][0]["containerPort"] = "7071"
    container["env"][0]["valu"] = container["env"][0].pop("value")
    found = list(problems(job, core_schema(job, definitions), definitions=definitions["batch/v1"]))
    inner = "spec.template.spec.containers[0]"
    assert found == [
        f"{inner}.env[0].valu: unknown field",
        f"{inner}.ports[0].containerPort: '7071' is not of type integer",
    ]


def test_the_validator_finds_what_is_wrong_in_the_servers_own_kinds(definitions: dict[str, dict[str, Any]]) -> None:
    [budget] = [one for one in render(CASES["cpu-run"]())["us-east5"] if one["kind"] == "PodDisruptionBudget"]
    budget["spec"]["minAvailible"] = budget["spec"].pop("minAvailable")
    schema = core_schema(budget, definitions)
    assert list(problems(budget, schema, definitions=definitions["policy/v1"])) == ["spec.minAvailible: unknown field"]


def test_kueue_takes_as_many_worker_groups_as_we_let_through(kueue: Path) -> None:
    text = (kueue / "pkg" / "controller" / "jobs" / "raycluster" / "common.go").read_text()
    [limit] = re.findall(r"len\(rayClusterSpec\.WorkerGroupSpecs\) > (\d+)", text)
    assert int(limit) == checks.MOST_WORKER_GROUPS
    types = (kueue / "apis" / "kueue" / "v1beta2" / "workload_types.go").read_text()
    [most] = re.findall(r"MaxItems=(\d+)\n(?:.*\n){0,2}\s+PodSets \[\]PodSet", types)
    assert int(most) == checks.MOST_WORKER_GROUPS + 1


def test_kuberay_still_calls_things_as_our_scripts_and_annotations_do(kuberay: Path) -> None:
    text = (kuberay / "controllers" / "ray" / "utils" / "constant.go").read_text()
    constants = dict(re.findall(r"(\w+)\s+= \"?([^\"\n]+)\"?", text))
    assert constants["RayOverwriteContainerCmdAnnotationKey"] == "ray.io/overwrite-container-cmd"
    assert constants["KUBERAY_GEN_RAY_START_CMD"] == "KUBERAY_GEN_RAY_START_CMD"
    assert constants["DefaultDashboardPort"] == str(names.DASHBOARD_PORT)
    assert constants["DefaultDashboardAgentListenPort"] == str(names.AGENT_PORT)
    assert constants["RayNodeHealthPath"] == "/api/healthz"
    assert constants["RayContainerIndex"] == "0"
