"""The rules over what every shipped stack declares, as the mocks record it: no refusal anywhere, and warnings that are
known. Stacks of the bed need paths of one machine and are looked at by the tests with the engine.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from infra.outputs import GLOBAL_OUTPUT, GlobalFacts
from infra.policy import Finding, Resource, check
from infra.policy.gpus import NODE_POOL
from infra.policy.resource import has_gpus
from infra.policy.stacks import settings_for
from infra.programs import program
from spec.stack import GlobalStack, RegionStack
from tests.builders.platforms import run_platform
from tests.builders.recorded_clouds import LOOKUPS
from tests.builders.recorded_stack import RecordedStack, record
from tests.builders.stack_files import NAMES, shipped

SHIPPED = [name for name in NAMES if not name.startswith("local.")]
PLATFORMS = [name for name in SHIPPED if name.endswith(".platform")]
ENVIRONMENT = GlobalFacts(
    project_number="123456789012", network="projects/example/global/networks/gkr", network_name="gkr",
    pods="10.64.0.0/10", node_account="gkr-nodes@example.iam.gserviceaccount.com",
)  # fmt: skip


def cluster_outputs(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """What only the cloud knows of a cluster."""
    del inputs
    return {
        "endpoint": "10.0.0.2",
        "masterAuth": {"clusterCaCertificate": "Y2E="},
        "controlPlaneEndpointsConfig": {"dnsEndpointConfig": {"endpoint": f"{name}.us-east5.gke.goog"}},
    }


@cache
def declared(name: str) -> RecordedStack:
    config = shipped(name).value
    if isinstance(config, GlobalStack):
        return record(program(name, config), stack=name, lookups=LOOKUPS)
    if isinstance(config, RegionStack):
        outputs = {config.global_stack: {GLOBAL_OUTPUT: ENVIRONMENT.model_dump()}}
        answers = {"gcp:container/cluster:Cluster": cluster_outputs}
        return record(program(name, config), stack=name, references=outputs, answers=answers)
    return run_platform(name)


def findings(name: str, *, applies: bool = False) -> list[Finding]:
    resources = [
        Resource(one.type, one.name, one.inputs, protect=one.protect) for one in declared(name).resources if one.custom
    ]
    assert resources
    return check(resources, settings=settings_for(name, stacks=NAMES, applies=applies))


@pytest.mark.parametrize("name", SHIPPED)
def test_no_rule_refuses_what_we_ship(name: str) -> None:
    refused = [str(one) for one in findings(name) if one.severity == "refuse"]
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_only_warnings_are_about_installers_of_google_and_images_of_the_example(name: str) -> None:
    warnings = [one for one in findings(name) if one.severity == "warn"]
    installers = [one for one in warnings if one.rule == "image-by-digest" and "gce-ai-infra" in one.message]
    assert [one for one in warnings if one not in installers and one.rule != "placeholder-image"] == []


@pytest.mark.parametrize("name", PLATFORMS)
def test_an_example_can_be_previewed_and_not_brought_up(name: str) -> None:
    refused = [one for one in findings(name, applies=True) if one.severity == "refuse"]
    assert {one.rule for one in refused} == {"placeholder-image"}
    assert any(one.name == "gkr-system-gkr-facts" for one in refused), "experiments take their image from the facts"
    assert all("make image NAME=" in one.remedy for one in refused)


def test_the_rules_see_gpu_pools_with_what_protects_them() -> None:
    pools = [
        one for one in declared("prod.us-east5").of(NODE_POOL) if has_gpus(Resource(one.type, one.name, one.inputs))
    ]
    assert pools
    assert all(one.protect and one.delete_before_replace for one in pools)
