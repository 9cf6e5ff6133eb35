"""What the bed installs works together: names, bucket, queue, operator. On the bed that `make e2e` brings up."""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

from spec.facts import ClusterFacts
from tools.bed import bucket, facts, fake_nodes, kueue
from tools.bed.holder import holder
from tools.bed.layout import Bed, bed
from tools.bed.run import kubectl

NAMESPACE = "gkr-1"
JOB_SECONDS = 240.0
RAY = "2.60.0"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0 or bool(os.environ.get("KUBECONFIG")), reason="is about the bed itself"),
]


@pytest.fixture(scope="module")
def one() -> Bed:
    found = bed(0)
    if holder(found) is None:
        pytest.skip("the bed is not up: make cluster")
    return found


@pytest.fixture(scope="module")
def document(one: Bed) -> ClusterFacts:
    found = json.loads(kubectl(one, "get", "configmap", facts.NAME, "-n", facts.NAMESPACE, "-o", "json"))
    return ClusterFacts.model_validate_json(found["data"][facts.KEY])


def pod_spec(document: ClusterFacts, *, name: str, command: list[str]) -> dict[str, Any]:
    site = document.site
    container: dict[str, Any] = {
        "name": name,
        "image": site.image,
        "imagePullPolicy": "Never",
        "volumeMounts": [{"name": one.name, "mountPath": one.mount_path, "readOnly": True} for one in site.mounts],
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}},
    }
    if command:
        container["command"] = command
    volumes = [{"name": one.name, "hostPath": {"path": one.host_path}} for one in site.mounts]
    return {"containers": [container], "volumes": volumes, "restartPolicy": "Never"}


@contextmanager
def applied(one: Bed, document: dict[str, Any]) -> Generator[str]:
    """An object of a name of its own, removed afterwards."""
    name = f"probe-{uuid.uuid4().hex[:8]}"
    document["metadata"] = {**document.get("metadata", {}), "name": name, "namespace": NAMESPACE}
    kubectl(one, "create", "-f", "-", stdin=json.dumps(document))
    try:
        yield name
    finally:
        kubectl(one, "delete", document["kind"].lower(), name, "-n", NAMESPACE, "--wait=false")


def test_a_pod_resolves_services_and_no_other_name(one: Bed, document: ClusterFacts) -> None:
    script = "getent hosts kubernetes.default.svc.cluster.local; getent hosts example.com || echo unknown"
    spec = pod_spec(document, name="names", command=["/bin/bash", "-c", script])
    with applied(one, {"apiVersion": "v1", "kind": "Pod", "spec": spec}) as name:
        wait = ("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", "-n", NAMESPACE, "--timeout=60s")
        kubectl(one, *wait, deadline_seconds=90)
        lines = kubectl(one, "logs", name, "-n", NAMESPACE).splitlines()
    assert [line.split() for line in lines] == [
        [one.api_service, "kubernetes.default.svc.cluster.local"],
        ["unknown"],
    ]


def test_the_bucket_refuses_what_a_commit_must_not_overwrite(one: Bed, document: ClusterFacts) -> None:
    found = json.loads(kubectl(one, "get", "secret", document.site.bucket_secret, "-n", NAMESPACE, "-o", "json"))
    keys = {key: base64.b64decode(value).decode() for key, value in cast("dict[str, str]", found["data"]).items()}
    store = S3Store(
        bucket.bucket_name("bed"), endpoint=document.site.bucket_env["AWS_ENDPOINT_URL"], region=bucket.REGION,
        access_key_id=keys[bucket.ACCESS], secret_access_key=keys[bucket.KEY], client_options={"allow_http": True},
    )  # fmt: skip
    path = f"probe/{uuid.uuid4().hex}"
    try:
        first = obstore.put(store, path, b"one", mode="create")
        with pytest.raises(AlreadyExistsError):
            obstore.put(store, path, b"two", mode="create")
        tag = first["e_tag"]
        assert tag
        obstore.put(store, path, b"three", mode={"e_tag": tag})
        with pytest.raises(PreconditionError):
            obstore.put(store, path, b"four", mode={"e_tag": tag})
        assert bytes(obstore.get(store, path).bytes()) == b"three"
    finally:
        obstore.delete(store, path)


def test_facts_nodes_and_quota_agree(one: Bed, document: ClusterFacts) -> None:
    nodes = json.loads(kubectl(one, "get", "nodes", "-l", fake_nodes.MACHINE_LABEL, "-o", "json"))["items"]
    machines = [node["metadata"]["labels"][fake_nodes.MACHINE_LABEL] for node in nodes]
    pools = {pool.machine: pool for pool in document.pools if pool.machine != "local-cpu"}
    assert {name: machines.count(name) for name in machines} == {name: pool.nodes for name, pool in pools.items()}
    queue = json.loads(kubectl(one, "get", "clusterqueue", kueue.QUEUE, "-o", "json"))
    assert {entry["type"]: entry["status"] for entry in queue["status"]["conditions"]} == {"Active": "True"}
    flavors = queue["spec"]["resourceGroups"][0]["flavors"]
    assert {flavor["name"] for flavor in flavors} == {"cpu", *pools}


def ray_job(document: ClusterFacts) -> dict[str, Any]:
    """A head and a worker behind a token; the job runs a task on the worker."""
    probe = {
        "httpGet": {"path": "/api/healthz", "port": 52365},
        "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 120,
    }  # fmt: skip
    templates: list[dict[str, Any]] = []
    for name in ("head", "worker"):
        spec = pod_spec(document, name=name, command=[])
        spec["containers"][0] |= {"env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}], "readinessProbe": probe}
        templates.append({"spec": spec})
    worker = {"groupName": "w", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, "rayStartParams": {"num-cpus": "1"}}
    code = "import ray; ray.init(); assert ray.get(ray.remote(lambda: 42).remote()) == 42"
    cluster = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": templates[0],
        },
        "workerGroupSpecs": [{**worker, "template": templates[1]}],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": kueue.QUEUE}},
        "spec": {
            "entrypoint": f'python -c "{code}"',
            "submissionMode": "HTTPMode",
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": cluster,
        },
    }


def test_a_ray_job_is_admitted_and_succeeds_behind_a_token(one: Bed, document: ClusterFacts) -> None:
    """Half a minute on an idle machine: two Ray nodes start from the repository's own environment."""
    with applied(one, ray_job(document)) as name:
        target = ("--for=jsonpath={.status.jobStatus}=SUCCEEDED", f"rayjob/{name}", "-n", NAMESPACE)
        kubectl(one, "wait", *target, f"--timeout={JOB_SECONDS:.0f}s", deadline_seconds=JOB_SECONDS + 10)
        workloads = json.loads(kubectl(one, "get", "workloads", "-n", NAMESPACE, "-o", "json"))["items"]
        owned = [load for load in workloads if load["metadata"]["ownerReferences"][0]["name"] == name]
        assert len(owned) == 1
        assert owned[0]["status"]["admission"]["clusterQueue"] == kueue.QUEUE
