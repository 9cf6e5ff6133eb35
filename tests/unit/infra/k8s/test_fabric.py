"""Networks of GPU NICs and what prepares nodes for them."""

from __future__ import annotations

import pytest

from infra.components.k8s.fabric import network_objects
from infra.components.k8s.installers import installer_objects
from infra.facts import RegionFabric
from manifests.fabric import TCPXO_PLUGIN, pod_fabric
from spec.errors import ConfigError
from spec.machines import machine
from spec.stack_platform import Installers
from tests.builders.platforms import region_facts

PLUGINS = "us-docker.pkg.dev/gce-ai-infra/gpudirect"
MEGA = Installers(
    tcpxo_plugin=f"{PLUGINS}-tcpxo/plugin:{TCPXO_PLUGIN}@sha256:{'0' * 64}",
    nri_injector=f"gcr.io/gke-release/nri-device-injector@sha256:{'0' * 64}",
)
ULTRA = Installers(gib_plugin=f"{PLUGINS}-gib/nccl-plugin-gib:v1.1.1@sha256:{'0' * 64}")


def fabrics(region: str) -> list[RegionFabric]:
    return list(region_facts(region).fabrics)


@pytest.mark.parametrize(("region", "row"), [("prod.us-east5", "a3-ultra"), ("prod.us-central1", "a3-mega")])
def test_every_network_that_a_pod_names_is_declared(region: str, row: str) -> None:
    declared = [one["metadata"]["name"] for one in network_objects(fabrics(region)) if one["kind"] == "Network"]
    named = pod_fabric(machine(row), gpus=8).annotations["networking.gke.io/interfaces"]
    assert all(f'"network": "{name}"' in named for name in declared)
    assert named.count('"network"') == 1 + len(declared)


def test_each_network_has_its_parameters_first() -> None:
    kinds = [one["kind"] for one in network_objects(fabrics("prod.us-east5"))]
    assert kinds == ["GKENetworkParamSet", "Network"] * 9


def test_networks_in_another_order_are_refused() -> None:
    [fabric] = fabrics("prod.us-east5")
    turned = fabric.model_copy(update={"networks": list(reversed(fabric.networks))})
    with pytest.raises(ConfigError, match="order"):
        network_objects([turned])


def test_a_missing_network_is_refused() -> None:
    [fabric] = fabrics("prod.us-central1")
    with pytest.raises(ConfigError, match="not 7"):
        network_objects([fabric.model_copy(update={"networks": fabric.networks[:7]})])


def test_two_machines_that_would_share_a_name_but_not_a_subnet_are_refused() -> None:
    [fabric] = fabrics("prod.us-east5")
    networks = [one.model_copy(update={"subnetwork": f"other-{one.name}"}) for one in fabric.networks]
    with pytest.raises(ConfigError, match="gvnic-1 of a4"):
        network_objects([fabric, RegionFabric(machine="a4", networks=networks)])


def test_managed_networks_need_no_objects() -> None:
    assert network_objects([RegionFabric(machine="a3-ultra")]) == []


def test_each_fabric_gets_its_own_installers() -> None:
    mega = installer_objects(MEGA, machines=["a3-mega"])
    ultra = installer_objects(ULTRA, machines=["a3-ultra", "a4", "a3-ultra"])
    assert [one["metadata"]["name"] for one in mega] == ["nccl-tcpxo-installer", "device-injector"]
    [only] = ultra
    required = only["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    [term] = required["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["nvidia-b200", "nvidia-h200-141gb"]
    assert installer_objects(Installers(), machines=["n2-standard-32"]) == []


def test_a_machine_whose_installer_is_not_configured_is_refused() -> None:
    for given, machines, field in ((Installers(), "a3-ultra", "gib_plugin"), (ULTRA, "a3-mega", "tcpxo_plugin")):
        with pytest.raises(ConfigError) as refused:
            installer_objects(given, machines=[machines])
        assert f"installers.{field}" in refused.value.message


def test_a_plugin_of_another_version_than_the_daemon_is_refused() -> None:
    other = MEGA.model_copy(update={"tcpxo_plugin": f"{PLUGINS}-tcpxo/plugin:v9.9.9@sha256:{'0' * 64}"})
    with pytest.raises(ConfigError, match=r"v9\.9\.9"):
        installer_objects(other, machines=["a3-mega"])
