"""What A3 pods get to reach the GPUs of other machines, and who gets nothing."""

from __future__ import annotations

import json

import pytest
import yaml

from manifests import fabric, names
from manifests.rayjob import rayjob
from spec.machines import CATALOGUE, machine
from tests.builders.plans import portrait, ultra


def test_mega_has_a_daemon_that_starts_before_everything_else_and_lets_the_pod_end() -> None:
    found = fabric.pod_fabric(machine("a3-mega"), gpus=8)
    [daemon] = found.sidecars
    assert daemon["restartPolicy"] == "Always"
    assert daemon["startupProbe"]["exec"]["command"] == ["cat", "/run/health-check"]
    assert {"name": "HEALTH_CHECK_LOG_FILE", "value": "/run/health-check"} in daemon["env"]
    assert set(daemon["securityContext"]["capabilities"]["add"]) == {"NET_ADMIN", "NET_BIND_SERVICE"}
    assert {one["mountPath"] for one in daemon["volumeMounts"]} == {"/usr/local/nvidia", "/hostsysfs", "/hostprocsysfs"}
    devices = yaml.safe_load(found.annotations[f"devices.gke.io/container.{daemon['name']}"])
    assert [one["path"] for one in devices] == [
        *(f"/dev/nvidia{index}" for index in range(8)),
        "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/dmabuf_import_helper",
    ]  # fmt: skip


def test_mega_has_the_eight_networks_of_its_gpus_and_the_plugins_profile() -> None:
    found = fabric.pod_fabric(machine("a3-mega"), gpus=8)
    interfaces = json.loads(found.annotations["networking.gke.io/interfaces"])
    assert [(one["interfaceName"], one["network"]) for one in interfaces] == [
        ("eth0", "default"), *((f"eth{index}", f"vpc{index}") for index in range(1, 9)),
    ]  # fmt: skip
    assert found.annotations["networking.gke.io/default-interface"] == "eth0"
    assert found.env["NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"] == "/dev/aperture_devices"
    assert found.env[fabric.PROFILE] == "/usr/local/nvidia/lib64/nccl-env-profile.sh"
    assert "NCCL_ALGO" not in found.env


def test_ultra_has_its_second_nic_and_eight_rdma_ones_and_fails_closed() -> None:
    found = fabric.pod_fabric(machine("a3-ultra"), gpus=8)
    interfaces = json.loads(found.annotations["networking.gke.io/interfaces"])
    assert [one["network"] for one in interfaces] == ["default", "gvnic-1", *(f"rdma-{index}" for index in range(8))]
    assert found.env["NCCL_NET"] == "gIB"
    assert found.env[fabric.PROFILE] == "/usr/local/gib/scripts/set_nccl_env.sh"
    assert {one["mountPath"] for one in found.mounts} == {"/usr/local/nvidia", "/usr/local/gib"}
    assert not found.sidecars


@pytest.mark.parametrize("row", [one for one in CATALOGUE if one.gpus], ids=lambda row: row.name)
def test_networks_are_as_many_as_the_node_pool_has(row: fabric.Machine) -> None:
    found = fabric.pod_fabric(row, gpus=row.gpus)
    if row.fabric in fabric.FABRICS:
        assert len(json.loads(found.annotations["networking.gke.io/interfaces"])) == 1 + row.extra_networks


def test_part_of_a_machine_or_a_machine_without_gpus_has_no_fabric() -> None:
    assert fabric.pod_fabric(machine("a3-ultra"), gpus=4) == fabric.PodFabric(env=fabric.CONTROL_ENV)
    assert fabric.pod_fabric(machine("n2-standard-8"), gpus=0) == fabric.PodFabric()


def test_only_trainer_pods_get_it() -> None:
    for plan in (portrait(), ultra()):
        for learner in plan.learners:
            spec = rayjob(plan, learner=learner)["spec"]["rayClusterSpec"]
            assert fabric.PROFILE not in json.dumps(spec["headGroupSpec"])
            for group in spec["workerGroupSpecs"]:
                role = group["template"]["metadata"]["labels"]["gkr/role"]
                assert (fabric.PROFILE in json.dumps(group)) == (role == names.TRAINER)


def test_the_daemon_comes_before_the_code_is_fetched() -> None:
    plan = portrait()
    [group] = [
        one
        for one in rayjob(plan, learner=plan.learner("central"))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        if one["groupName"] == "trainer"
    ]
    assert [one["name"] for one in group["template"]["spec"]["initContainers"]] == ["tcpxo-daemon", "code"]
