"""Platform stacks without a cluster: facts as their regions would export them, and what their programs declare."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from infra.facts import AttachedNetwork, RegionFabric, RegionFacts, RegionSyncer
from infra.programs.platform_stack import platform_program
from spec.facts import MachinePool
from spec.stack_fabric import fabric_networks
from spec.stack_global import GlobalStack
from spec.stack_platform import PlatformStack
from spec.stack_region import RegionStack
from tests.builders.recorded_stack import RecordedStack, record
from tests.builders.stack_files import NAMES, shipped

PLATFORMS = [name for name in NAMES if name.endswith(".platform")]
IMAGE = f"us-docker.pkg.dev/example/gkr/trainer@sha256:{'1' * 64}"
KUBECONFIG = "apiVersion: v1\nkind: Config\n"


def platform(name: str, *changes: str) -> PlatformStack:
    """A shipped platform stack with changes as `--set` takes them."""
    config = cast(PlatformStack, shipped(name, *changes).value)
    if config.site.image and ("@" in config.site.image or "$" in config.site.image):
        return config
    return cast(PlatformStack, shipped(name, f"site.image={IMAGE}", *changes).value)


def run_platform(name: str, *changes: str, region: Mapping[str, Any] | None = None) -> RecordedStack:
    """What the program of a shipped platform declares. `region`: what its region exports, where not the usual. A
    platform as it is shipped is the same object for every test, which must not change it.
    """
    if not changes and region is None and not name.startswith("local."):
        return _run_shipped(name)
    return _run(name, *changes, region=region)


@cache
def _run_shipped(name: str) -> RecordedStack:
    """Of a platform that reads nothing from the environment."""
    return _run(name)


def _run(name: str, *changes: str, region: Mapping[str, Any] | None = None) -> RecordedStack:
    config = platform(name, *changes)
    given = outputs(config.region_stack) if region is None else region
    return record(platform_program(name, config=config), stack=name, references={config.region_stack: given})


def region_facts(name: str) -> RegionFacts:
    """What the region stack of that name exports once it is up."""
    config = cast(RegionStack, shipped(name).value)
    undelivered = {one.path for one in config.reservations if not one.delivered}
    pools = [
        MachinePool(
            name=config.cpu_pool.name, machine=config.cpu_pool.machine, nodes=config.cpu_pool.max_nodes,
            cpu=config.cpu_pool.cpu, memory=config.cpu_pool.memory,
        )
    ]  # fmt: skip
    for pool in config.gpu_pools:
        reserved = pool.capacity.reserved
        waits = reserved is not None and reserved.reservation in undelivered
        pools.append(MachinePool(name=pool.name, machine=pool.machine, nodes=0 if waits else pool.nodes))
    reserved_host = config.syncer.mode == "firewall" and not config.syncer.host
    return RegionFacts(
        name=config.cluster.name,
        region=config.region,
        pools=pools,
        bucket=config.bucket.address,
        registry=config.registry.uri or f"{config.region}-docker.pkg.dev/{config.project}/{config.registry.name}",
        syncer=RegionSyncer(
            control_port=config.syncer.control_port,
            bulk_port=config.syncer.bulk_port,
            host=config.syncer.host or ("10.0.0.9" if reserved_host else ""),
            reserved=reserved_host,
            peers=["10.64.0.0/12"],
        ),
        fabrics=[_fabric(config, pool.machine) for pool in {one.machine: one for one in config.gpu_pools}.values()],
        managed_monitoring=config.cluster.dcgm,
        researchers=cast(GlobalStack, shipped(config.global_stack).value).identity.researchers,
        queued={one.name: int(one.capacity.max_run or 0) for one in config.gpu_pools if one.capacity.queued},
    )


def _fabric(config: RegionStack, machine: str) -> RegionFabric:
    given = config.fabrics.get(machine)
    row = next(pool.row for pool in config.gpu_pools if pool.machine == machine)
    if given is None or given.mode != "device":
        return RegionFabric(machine=machine)
    cluster = config.cluster.name
    networks = [
        AttachedNetwork(
            name=one.name,
            network=f"{cluster}-{one.name if one.own_vpc else 'rdma'}",
            subnetwork=f"{cluster}-{one.name}",
            mode=one.mode,
        )
        for one in fabric_networks(row)
    ]
    return RegionFabric(machine=machine, networks=networks)


def outputs(stack: str, **changes: Any) -> dict[str, Any]:
    """Outputs of a region stack; a change to None takes a field of the facts away."""
    facts: dict[str, Any] = {**region_facts(stack).model_dump(mode="json"), **changes}
    return {"facts": {key: value for key, value in facts.items() if value is not None}, "kubeconfig": KUBECONFIG}


def chart_folders(folder: Path) -> Mapping[str, str]:
    """Environment of the local stacks: charts and manifests of operators, as a test bed has them."""
    chart = folder / "kueue"
    chart.mkdir()
    (chart / "Chart.yaml").write_text("name: kueue\nversion: 0.17.0\n", encoding="utf-8")
    manifests = folder / "kuberay"
    manifests.mkdir()
    (manifests / "all.yaml").write_text(yaml.safe_dump_all(OPERATOR_MANIFESTS), encoding="utf-8")
    return {
        "GKR_KUEUE_CHART": str(chart),
        "GKR_KUBERAY_CHART": str(manifests),
        "GKR_BED_IMAGE": "localhost/gkr/hostroot:1f2e3d",
        "GKR_BED_PYTHON": "/usr",
        "GKR_BED_REPOSITORY": "/srv/gkr",
    }


OPERATOR_MANIFESTS: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kuberay-system"}},
    {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "kuberay-operator", "namespace": "kuberay-system"},
        "spec": {"template": {"spec": {"containers": [{"name": "kuberay-operator", "image": "upstream:1"}]}}},
    },
    {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "rayclusters.ray.io"},
        "spec": {"group": "ray.io"},
    },
]
"""What a folder of manifests holds, in an order that does not work as it is."""
