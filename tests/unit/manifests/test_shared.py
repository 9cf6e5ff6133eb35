"""Shared services: what experiments are told is what listens, and the head's script ends with either of its parts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manifests import scripts
from manifests.shared import FIRST_PORT, endpoints, holdings, ports, shared_objects, shared_plan
from spec.errors import ConfigError
from spec.plan import Plan
from spec.service_placement import SHARED_CLIENTS
from spec.services import ServiceConfig
from tests.builders.shared import GIB, SHARED

ULTRA = SHARED["ultra"]


def of(kind: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def test_every_endpoint_is_a_service_that_selects_the_pods_of_one_replica() -> None:
    objects = shared_objects(ULTRA)
    [cluster] = of("RayCluster", objects)
    services = {one["metadata"]["name"]: one["spec"] for one in of("Service", objects)}
    groups = {one["groupName"]: one for one in cluster["spec"]["workerGroupSpecs"]}
    published = [address for one in endpoints(ULTRA).values() for address in one.endpoints]
    assert len(published) == len(services) == len(groups) == 3
    for address in published:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        name, namespace, *rest = host.split(".")
        assert (namespace, rest) == ("gkr-system", ["svc", "cluster", "local"])
        spec = services[name]
        assert [one["port"] for one in spec["ports"]] == [int(port)]
        [group] = [
            one for one in groups.values() if spec["selector"].items() <= one["template"]["metadata"]["labels"].items()
        ]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1


def test_ports_are_counted_as_the_host_in_the_head_counts_them() -> None:
    plan = shared_plan(ULTRA)
    assert list(ports(ULTRA)) == [one.name for one in plan.home.services]
    assert list(ports(ULTRA).values()) == [7200, 7201, 7202]
    [cluster] = of("RayCluster", shared_objects(ULTRA))
    env = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": FIRST_PORT, "value": "7200"} in env
    assert FIRST_PORT in scripts.SHARED_HEAD


def test_a_shared_replica_has_room_for_many_ranks_it_does_not_know() -> None:
    for one in shared_plan(ULTRA).home.services:
        assert 0 < one.queue_bytes <= one.memory // 2 // SHARED_CLIENTS
    wanted = ServiceConfig.model_validate({"kind": "encode", "queue_bytes": "1Mi", "max_delay_ms": 5})
    asked = replace(ULTRA, services={"encoder": wanted})
    [one] = shared_plan(asked).home.services
    assert (one.queue_bytes, one.max_delay_ms) == (2**20, 5)


def test_a_shared_replica_serves_the_model_that_lies_in_the_regions_bucket() -> None:
    asked = replace(ULTRA, services={"encoder": ServiceConfig(kind="encode", model="{bucket}/models/t5")})
    [one] = shared_plan(asked).home.services
    assert one.model == f"{ULTRA.bucket.rstrip('/')}/models/t5"


def test_the_plan_in_the_pods_is_read_back() -> None:
    [files] = of("ConfigMap", shared_objects(ULTRA))
    assert Plan.read_json(files["data"]["plan.json"]) == shared_plan(ULTRA)
    assert "immutable" not in files


def test_experiments_reach_the_ports_of_replicas_only() -> None:
    [policy] = of("NetworkPolicy", shared_objects(ULTRA))
    [rule] = [
        one for one in policy["spec"]["ingress"]
        if one["from"] == [{"namespaceSelector": {"matchLabels": {"gkr/managed": "true"}}}]
    ]  # fmt: skip
    assert [one["port"] for one in rule["ports"]] == [7200, 7201, 7202]


def test_pods_are_neither_queued_nor_left_behind_by_a_new_image() -> None:
    [cluster] = of("RayCluster", shared_objects(ULTRA))
    assert "kueue.x-k8s.io/queue-name" not in cluster["metadata"]["labels"]
    assert cluster["spec"]["upgradeStrategy"] == {"type": "Recreate"}
    [other] = of("RayCluster", shared_objects(replace(ULTRA, image="registry/services:2")))
    assert cluster["spec"] != other["spec"]


def test_what_is_held_is_what_the_pods_request() -> None:
    held = holdings(ULTRA)
    assert held["H200"]["nvidia.com/gpu"] == 2
    assert held["H200"]["cpu"] == 16
    assert held["H200"]["memory"] == 2 * (64 * GIB + GIB // 2)
    assert held[""]["cpu"] == 8 + 1
    assert held[""]["nvidia.com/gpu"] == 0
    assert holdings(replace(ULTRA, services={})) == {}


def test_nothing_shared_is_nothing_declared() -> None:
    assert shared_objects(replace(ULTRA, services={})) == []


def test_a_name_that_kuberay_would_cut_is_refused() -> None:
    long = {"a" * 40: ServiceConfig(kind="encode")}
    with pytest.raises(ConfigError, match="more than the 50"):
        shared_objects(replace(ULTRA, services=long))


def test_ports_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="65536"):
        shared_objects(replace(ULTRA, first_port=65534))


def _run_head(folder: Path, *, ray: str, host: str) -> subprocess.CompletedProcess[str]:
    """The head's script with its two parts replaced by what they would do."""
    script = folder / "head.sh"
    script.write_text(scripts.SHARED_HEAD, encoding="utf-8")
    fake = folder / "python"
    fake.write_text(f"#!/bin/bash\n{host}\n", encoding="utf-8")
    fake.chmod(0o755)
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": ray, "GKR_PLAN": "plan.json",
        FIRST_PORT: "7200",
    }  # fmt: skip
    return subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False, timeout=20)


def test_the_head_ends_when_ray_ends_and_takes_the_host_along(tmp_path: Path) -> None:
    mark = tmp_path / "host-ended"
    host = f"trap 'touch {mark}; exit 0' TERM; while :; do sleep 0.05; done"
    done = _run_head(tmp_path, ray="sleep 0.3; exit 7", host=host)
    assert done.returncode == 7
    assert mark.exists()


def test_the_head_ends_when_the_host_ends_and_takes_ray_along(tmp_path: Path) -> None:
    mark = tmp_path / "ray-ended"
    ray = f"trap 'touch {mark}; exit 0' TERM; while :; do sleep 0.05; done"
    done = _run_head(tmp_path, ray=ray, host='echo "$@"; sleep 0.3; exit 1')
    assert done.returncode == 1
    assert mark.exists()
    assert "-m services.standing --plan plan.json --first-port 7200" in done.stdout


def test_only_the_head_starts_the_host(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\necho "$@"\n', encoding="utf-8")
    fake.chmod(0o755)
    for role, started in (("head", "bash /gkr/plan/head.sh"), ("service", "bash -c ray start")):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GKR_ROLE": role, "KUBERAY_GEN_RAY_START_CMD": "ray start"}
        script = ["bash", "-c", scripts.SHARED_START]
        done = subprocess.run(script, env=env, capture_output=True, text=True, check=True, timeout=20)
        assert done.stdout.strip() == f"-m training.pod --role {role} -- {started}"
