"""Every object of a platform against the schemas of the pinned versions: the API server's own, KubeRay's and Kueue's.

Needs the modules that the tools are built from. Google's resource types are not among them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.components.k8s.fabric import API as NETWORKING
from infra.components.k8s.installers import installer_objects
from infra.components.k8s.namespaces import content_objects, namespace_objects
from infra.components.k8s.queues import local_queues, queue_objects
from infra.components.k8s.rights import rights_objects
from infra.components.k8s.shared import shared_services
from infra.components.k8s.syncer import access_objects
from infra.components.k8s.webhook import webhook_objects
from infra.components.ops.health import controller_objects, xid_objects
from infra.facts import NAMESPACE, cluster_facts, config_map, site_of
from manifests.shared import holdings, shared_objects
from tests.builders.platforms import IMAGE, PLATFORMS, chart_folders, platform, region_facts
from tests.builders.structural import problems
from tools.binaries import module_folder

pytestmark = pytest.mark.cluster

_CORE = {
    "v1": "api__v1", "apps/v1": "apis__apps__v1", "batch/v1": "apis__batch__v1",
    "networking.k8s.io/v1": "apis__networking.k8s.io__v1",
    "rbac.authorization.k8s.io/v1": "apis__rbac.authorization.k8s.io__v1",
}  # fmt: skip


@pytest.fixture(scope="module")
def definitions() -> dict[str, dict[str, Any]]:
    folder = module_folder("kubernetes", "k8s.io/kubernetes") / "api" / "openapi-spec" / "v3"
    return {
        version: json.loads((folder / f"{name}_openapi.json").read_text())["components"]["schemas"]
        for version, name in _CORE.items()
    }


@pytest.fixture(scope="module")
def types() -> dict[tuple[str, str], dict[str, Any]]:
    """(API version, kind) -> schema of the resource types that the operators bring."""
    folders = (
        module_folder("kuberay", "github.com/ray-project/kuberay/ray-operator") / "config" / "crd" / "bases",
        module_folder("kueue", "sigs.k8s.io/kueue") / "config" / "components" / "crd" / "bases",
    )
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml")) if "rayservice" not in path.name):
        crd = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
        for version in crd["spec"]["versions"]:
            api = f"{crd['spec']['group']}/{version['name']}"
            found[api, crd["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return found


def declared(name: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    config = platform(name)
    region = region_facts(config.region_stack)
    site = site_of(config, region=region, environment=environment)
    shared = shared_services(config.shared, region=region, site=site) if config.shared else None
    return [
        *namespace_objects([NAMESPACE, *config.namespaces]),
        *content_objects([NAMESPACE, *config.namespaces], site=site, secrets={}),
        *rights_objects(config.namespaces, researchers=region.researchers),
        *installer_objects(config.installers, machines=[one.machine for one in region.fabrics]),
        *webhook_objects(image=IMAGE, site=site, version=config.kueue.chart.version),
        *queue_objects(config.kueue, region=region, holdings=holdings(shared) if shared else {}),
        *local_queues(config.kueue, namespaces=config.namespaces),
        *(shared_objects(shared) if shared else []),
        *access_objects(region.syncer, namespace=config.namespaces[0]),
        *controller_objects(config.health),
        *xid_objects(config.health),
        config_map(cluster_facts(config, region=region, site=site)),
    ]


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_object_is_one_that_the_api_server_takes_whole(
    name: str, tmp_path: Path, definitions: dict[str, dict[str, Any]], types: dict[tuple[str, str], dict[str, Any]]
) -> None:
    seen: set[str] = set()
    for one in declared(name, dict(chart_folders(tmp_path))):
        api, kind = one["apiVersion"], one["kind"]
        assert api != NETWORKING
        seen.add(kind)
        if api not in _CORE:
            assert list(problems(one, types[api, kind])) == [], one
            continue
        group, _, version = api.rpartition("/")
        wanted = {"group": group, "kind": kind, "version": version}
        schema = next(
            found for found in definitions[api].values() if wanted in found.get("x-kubernetes-group-version-kind", [])
        )
        assert list(problems(one, schema, definitions=definitions[api])) == [], one
    assert {"ClusterQueue", "ResourceFlavor", "Job", "ClusterRole", "NetworkPolicy"} <= seen
