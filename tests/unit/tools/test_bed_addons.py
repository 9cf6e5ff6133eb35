"""The bed's add-ons as far as they are data: what is applied, and how it follows from what was asked for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from spec.errors import GkrError
from spec.facts import ClusterFacts
from tools.bed import bucket, dns, facts, kuberay, kueue, kwok
from tools.bed.addons import RealNode
from tools.bed.layout import Wanted, bed
from tools.bed.rendered import only

GIB = 2**30
REAL = RealNode(cores=2.0, memory=20 * GIB, storage=50 * GIB, gpus=0, gpus_allocatable=0)


def deployment(name: str) -> dict[str, Any]:
    probe = {"httpGet": {"path": "/x"}, "initialDelaySeconds": 10, "periodSeconds": 10}
    container = {"name": "manager", "image": "far.example/away:1", "imagePullPolicy": "Always", "readinessProbe": probe}
    metadata = {"name": name, "namespace": "default"}
    spec = {"template": {"spec": {"containers": [container]}}}
    return {"kind": "Deployment", "metadata": metadata, "spec": spec}


def hook(group: str, resource: str) -> dict[str, Any]:
    return {"name": f"v{resource}", "rules": [{"apiGroups": [group], "resources": [resource]}]}


def queue_objects(nodes: dict[str, int]) -> list[dict[str, Any]]:
    return kueue.queues(nodes, real=REAL.quota, namespaces=facts.NAMESPACES, selector=facts.MANAGED)


def quotas(objects: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    group = only(objects, kind="ClusterQueue", name="research")["spec"]["resourceGroups"][0]
    return {
        flavor["name"]: {one["name"]: one["nominalQuota"] for one in flavor["resources"]} for flavor in group["flavors"]
    }


def test_one_group_covers_all_resources_and_the_real_node_comes_after_the_gpus() -> None:
    objects = queue_objects({"n2-standard-8": 1, "a3-ultra": 64, "a3-mega": 32})
    spec = only(objects, kind="ClusterQueue", name="research")["spec"]
    assert len(spec["resourceGroups"]) == 1
    found = quotas(objects)
    assert list(found) == ["a3-ultra", "a3-mega", "cpu", "n2-standard-8"]
    assert found["cpu"]["nvidia.com/gpu"] == "0"
    assert found["a3-ultra"]["nvidia.com/gpu"] == "512"
    assert found["a3-mega"]["cpu"] == "6400"
    assert found["a3-mega"]["memory"] == str(32 * 1700 * GIB)
    assert all(list(one) == spec["resourceGroups"][0]["coveredResources"] for one in found.values())


def test_every_flavor_in_the_queue_exists_and_gpu_flavors_keep_others_off_their_nodes() -> None:
    objects = queue_objects({"a3-ultra": 1, "n2-standard-8": 2})
    flavors = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "ResourceFlavor"}
    assert set(flavors) == set(quotas(objects))
    gpu, plain = flavors["a3-ultra"], flavors["n2-standard-8"]
    assert gpu["nodeLabels"] == {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}
    assert gpu["nodeTaints"] == [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    assert gpu["topologyName"] == only(objects, kind="Topology", name="gke-default")["metadata"]["name"]
    assert "topologyName" not in plain
    assert "nodeTaints" not in plain
    assert plain["nodeLabels"] != flavors["cpu"]["nodeLabels"]


def test_the_queue_takes_only_managed_namespaces_and_each_of_them_has_a_local_queue() -> None:
    objects = queue_objects({})
    selector = only(objects, kind="ClusterQueue", name="research")["spec"]["namespaceSelector"]["matchLabels"]
    namespaces = {one["metadata"]["name"]: one["metadata"]["labels"] for one in facts.namespaces()}
    managed = {name for name, labels in namespaces.items() if selector.items() <= labels.items()}
    local = {one["metadata"]["namespace"] for one in objects if one["kind"] == "LocalQueue"}
    assert managed == local == {"gkr-0", "gkr-1"}


def test_the_bed_keeps_a_part_of_its_node_for_itself() -> None:
    assert REAL.quota["cpu"] == "1700m"
    assert REAL.quota["memory"] == str(19 * GIB)


def test_a_machine_without_a_size_is_no_fake_node() -> None:
    with pytest.raises(GkrError, match="local-cpu has no size"):
        queue_objects({"local-cpu": 2})


def test_kueue_keeps_the_webhooks_of_its_own_kinds_and_of_the_frameworks_in_use() -> None:
    hooks = [
        hook("", "pods"), hook("apps", "deployments"), hook("kueue.x-k8s.io", "workloads"), hook("batch", "jobs"),
        hook("ray.io", "rayjobs"), hook("ray.io", "rayservices"), hook("kubeflow.org", "mpijobs"),
    ]  # fmt: skip
    settings = "leaderElection: {leaderElect: true}\nintegrations: {frameworks: [pod]}\n"
    upstream: list[dict[str, Any]] = [
        {"kind": "ValidatingWebhookConfiguration", "metadata": {"name": "v"}, "webhooks": hooks},
        {"kind": "ConfigMap", "metadata": {"name": "kueue-manager-config"}, "data": {kueue.CONFIG_KEY: settings}},
        deployment(kueue.NAME),
    ]
    before = copy.deepcopy(upstream)
    result = kueue.adapt(upstream, image="localhost/gkr/kueue:1")
    assert upstream == before
    assert [one["name"] for one in result[0]["webhooks"]] == ["vworkloads", "vjobs", "vrayjobs"]
    changed = result[1]["data"][kueue.CONFIG_KEY]
    assert "leaderElect: false" in changed
    assert "- ray.io/rayjob\n" in changed
    assert "- pod\n" not in changed


@pytest.mark.parametrize("adapt", [kueue.adapt, kuberay.adapt])
def test_an_upstream_without_the_expected_deployment_is_refused(adapt: Any) -> None:
    settings = {"kind": "ConfigMap", "metadata": {"name": "kueue-manager-config"}}
    text = "{leaderElection: {}, integrations: {}}"
    with pytest.raises(GkrError, match="expected one Deployment"):
        adapt([{**settings, "data": {kueue.CONFIG_KEY: text}}], image="x")


def test_kuberay_moves_into_its_own_namespace_with_its_rights() -> None:
    binding = {
        "kind": "RoleBinding",
        "metadata": {"name": "b", "namespace": "default"},
        "subjects": [{"kind": "ServiceAccount", "name": "kuberay-operator", "namespace": "default"}],
    }
    versions = [{"name": "v1", "storage": True}, {"name": "v1alpha1", "storage": False}]
    types = {"kind": "CustomResourceDefinition", "metadata": {"name": "rayjobs.ray.io"}, "spec": {"versions": versions}}
    result = kuberay.adapt([types, binding, deployment(kuberay.NAME)], image="localhost/gkr/kuberay:1")
    assert [one["kind"] for one in result] == ["Namespace", "CustomResourceDefinition", "RoleBinding", "Deployment"]
    assert [one["name"] for one in result[1]["spec"]["versions"]] == ["v1"]
    assert result[2]["metadata"]["namespace"] == result[2]["subjects"][0]["namespace"] == "kuberay-system"
    container = result[3]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "localhost/gkr/kuberay:1"
    assert container["imagePullPolicy"] == "Never"
    assert "cpu" not in container["resources"]["limits"]
    assert container["readinessProbe"]["periodSeconds"] == 1


def test_fake_pods_of_a_job_run_as_long_as_their_annotation_says() -> None:
    upstream = [{"kind": "Stage", "metadata": {"name": name}, "spec": {}} for name in ("pod-ready", "pod-complete")]
    result = kwok.adapt(upstream)
    assert result[0]["spec"] == {}
    assert result[1]["spec"]["delay"]["durationFrom"]["expressionFrom"] == '.metadata.annotations["gkr/run-for"]'


def test_names_are_never_asked_of_the_outside() -> None:
    assert "forward" not in dns.COREFILE
    service = only(dns.objects("image", address="10.96.0.10"), kind="Service", name="kube-dns")
    assert service["spec"]["clusterIP"] == "10.96.0.10"


def test_the_bucket_has_one_address_and_its_keys_come_from_a_secret() -> None:
    pod = bucket.objects("image", folder=Path("/x"), address="10.201.1.2")[0]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["hostNetwork"] is True
    assert "10.201.1.2:9000" in container["args"]
    assert bucket.environment("10.201.1.2")["AWS_ENDPOINT_URL"] == "http://10.201.1.2:9000"
    secret = bucket.secret("gkr-0", keys=bucket.new_keys())
    needed = {one["valueFrom"]["secretKeyRef"]["key"] for one in container["env"]}
    assert needed == set(secret["stringData"])
    assert bucket.new_keys() != bucket.new_keys()


def test_facts_are_read_back_as_they_were_meant() -> None:
    wanted = Wanted(fake={"a3-ultra": 64}, regions=2)
    written = facts.cluster_facts(
        bed(1, root=Path("/state")), wanted=wanted, cores=2.0, memory=19 * GIB, image="localhost/gkr/hostroot:1",
        mounts=(Path("/usr"), Path("/work/a.b_c")),
    )  # fmt: skip
    read = ClusterFacts.model_validate_json(facts.config_map(written)["data"][facts.KEY])
    assert read == written
    assert (read.name, read.region, read.backend) == ("bed-1", "bed-b", "kubernetes")
    assert [(pool.name, pool.nodes) for pool in read.pools] == [("cpu", 16), ("a3-ultra", 64)]
    assert read.pools[0].node_memory == 19 * GIB
    assert read.gpu_types() == ["H200"]
    assert read.site.topology_level == "cloud.google.com/gce-topology-subblock"
    mounts = [(one.name, one.host_path, one.mount_path, one.read_only) for one in read.site.mounts]
    assert mounts == [("host-0", "/usr", "/usr", True), ("host-1", "/work/a.b_c", "/work/a.b_c", True)]
    assert read.syncer is not None
    assert read.syncer.host == "10.202.0.2"


def test_one_region_alone_names_no_address_for_others_and_no_topology_without_gpus() -> None:
    written = facts.cluster_facts(
        bed(0, root=Path("/state")), wanted=Wanted(), cores=2.0, memory=GIB, image="i", mounts=()
    )  # fmt: skip
    assert written.syncer is not None
    assert written.syncer.host == ""
    assert written.site.topology_level == ""
