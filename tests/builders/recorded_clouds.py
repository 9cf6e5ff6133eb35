"""Global and region stacks without a cloud: what their programs declare, with answers as Google Cloud gives them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from infra.programs import program
from spec.stack import GlobalStack, RegionStack
from tests.builders.recorded_stack import Answer, RecordedStack, record
from tests.builders.stack_files import NAMES, shipped

CLOUDS = [name for name in NAMES if not name.endswith(".platform")]
"""Shipped stacks of Google Cloud's part."""
REGIONS = [name for name in CLOUDS if not name.endswith(".global")]
NUMBER = "123456789012"
STORAGE_AGENT = f"serviceAccount:service-{NUMBER}@gs-project-accounts.iam.gserviceaccount.com"
LOOKUPS = {
    "gcp:organizations/getProject:getProject": {"number": NUMBER},
    "gcp:storage/getProjectServiceAccount:getProjectServiceAccount": {"member": STORAGE_AGENT},
}
DNS_ENDPOINT = "gke-0123.us-east5.gke.goog"
GPU_POOL = "gcp:container/nodePool:NodePool"


def _account(_name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    email = f"{inputs['accountId']}@{inputs['project']}.iam.gserviceaccount.com"
    return {"email": email, "member": f"serviceAccount:{email}"}


def _cluster(_name: str, _inputs: Mapping[str, Any]) -> dict[str, Any]:
    dns = {"dnsEndpointConfig": {"endpoint": DNS_ENDPOINT}}
    return {"endpoint": "10.0.0.2", "masterAuth": {"clusterCaCertificate": "Y2E="}, "controlPlaneEndpointsConfig": dns}


def _address(_name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"address": f"address of {inputs['name']}", "selfLink": f"link of {inputs['name']}"}


ANSWERS: Mapping[str, Answer] = {
    "gcp:serviceaccount/account:Account": _account,
    "gcp:container/cluster:Cluster": _cluster,
    "gcp:compute/address:Address": _address,
    "gcp:compute/subnetwork:Subnetwork": lambda _name, inputs: {"selfLink": f"link of {inputs['name']}"},
    "gcp:compute/network:Network": lambda _name, inputs: {
        "id": f"projects/{inputs['project']}/global/networks/{inputs['name']}"
    },
}


def run_global(name: str, *changes: str) -> RecordedStack:
    """What the program of a shipped global stack declares, with changes as `--set` takes them."""
    config = shipped(name, *changes).value
    return record(program(name, config), stack=name, answers=ANSWERS, lookups=LOOKUPS)


def run_region(name: str, *changes: str, environment: Mapping[str, Any] | None = None) -> RecordedStack:
    """The same of a region stack. `environment`: what its global stack exports, where not the usual."""
    config = cast(RegionStack, shipped(name, *changes).value)
    outputs = global_outputs(config.global_stack) if environment is None else environment
    return record(
        program(name, config), stack=name, answers=ANSWERS, references={config.global_stack: outputs}, lookups={}
    )


@cache
def run_shipped(name: str) -> RecordedStack:
    """A shipped stack as it is; the same object for every test, which must not change it."""
    return run_global(name) if isinstance(shipped(name).value, GlobalStack) else run_region(name)


def global_outputs(name: str) -> dict[str, Any]:
    """What a shipped global stack exports."""
    return run_shipped(name).outputs


def gpu_pool(name: str, pool: str, *changes: str) -> dict[str, Any]:
    """Inputs of a node pool of a region stack."""
    recorded = run_region(name, *changes) if changes else run_shipped(name)
    return recorded.one(GPU_POOL, pool).inputs
