"""Shipped stacks through the real engine, from nothing to up and down again."""

from __future__ import annotations

from pathlib import Path

import pulumi
import pytest
from pulumi_gcp import compute

from infra.components.base import options
from infra.outputs import GLOBAL_OUTPUT, REGION_OUTPUT
from spec.errors import EXIT_OK, RefusedError
from tests.builders.engine import World, declares, step, world
from tests.builders.platforms import outputs
from tests.builders.stack_files import NAMES

pytestmark = pytest.mark.engine
ENVIRONMENTS = sorted({name.split(".")[0] for name in NAMES})
DEV = "dev.us-east4"


@pytest.fixture(scope="module")
def globals_up(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Every environment's global stack, up."""
    found = world(tmp_path_factory.mktemp("all"))
    for environment in ENVIRONMENTS:
        found.stack(f"{environment}.global").up()
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(".platform")])
def test_every_shipped_stack_can_be_previewed(globals_up: World, name: str) -> None:
    found = globals_up.preview(name)
    assert found.exit_code == EXIT_OK, [one.reason for one in found.blocks]
    kind = "same" if name.endswith(".global") else "create"
    assert set(found.counts) <= {kind, "read"}
    assert 10 < found.counts[kind] < 300


def test_a_reservation_that_is_not_delivered_gives_a_pool_of_no_nodes(globals_up: World) -> None:
    found = globals_up.preview("prod.us-central1")
    new = step(found, "mega-2").new
    assert new is not None
    assert new.inputs["nodeCount"] == 0
    delivered = globals_up.preview("prod.us-central1", "reservations[1].delivered=true")
    later = step(delivered, "mega-2").new
    assert later is not None
    assert later.inputs["nodeCount"] == 64


def test_an_up_that_ran_out_of_machines_goes_on_where_it_stopped(globals_up: World) -> None:
    cloud = globals_up.cloud
    cloud.set_faults(stock_out=["mega-spot"])
    with pytest.raises(RefusedError, match="RESOURCE_POOL_EXHAUSTED") as refused:
        globals_up.stack(DEV).up()
    assert f"make up STACK={DEV}" in refused.value.hint
    made = len(cloud.things())
    assert any(identity.endswith("/nodePools/cpu") for _, identity in cloud.things())
    cloud.set_faults()
    counts = globals_up.stack(DEV).up()
    assert counts["same"] > 30
    assert len(cloud.things()) - made < 10
    assert set(globals_up.preview(DEV).counts) <= {"same", "read"}
    facts = (globals_up.stack(DEV).outputs() or {})[REGION_OUTPUT]
    assert facts["name"] == "dev-us-east4"
    globals_up.stack(DEV).down()
    assert [one for one in cloud.things() if "dev-us-east4" in one[1]] == []
    assert globals_up.stack(DEV).outputs() is None


def test_facts_without_a_field_fail_with_the_name_of_the_stack_that_should_say_it(globals_up: World) -> None:
    said = outputs("prod.us-east5", bucket=None)

    def export() -> None:
        for name, value in said.items():
            pulumi.export(name, value)

    globals_up.stack("prod.us-east5", declare=declares(export)).up()
    preview, _ = globals_up.stack("prod.us-east5.platform").preview()
    text = "\n".join(one.message for one in preview.diagnostics)
    assert "facts of stack prod.us-east5 cannot be used: field bucket is missing" in text
    assert "make up STACK=prod.us-east5" in text


def test_a_region_whose_environment_says_nothing_fails_with_the_command(globals_up: World) -> None:
    globals_up.stack("local.global", declare=declares(lambda: pulumi.export("other", 1))).up()
    preview, _ = globals_up.stack("local.bed-a").preview()
    text = "\n".join(one.message for one in preview.diagnostics)
    assert f"stack local.global has no output {GLOBAL_OUTPUT}" in text
    assert "make up STACK=local.global" in text


class Fabric(pulumi.ComponentResource):
    """A component of a test, whose network is protected."""

    def __init__(self, name: str, *, network: str, aliases: list[pulumi.Alias] | None = None) -> None:
        super().__init__("gkr:test:Fabric", name)
        compute.Network(
            network, name="net-1", project="example", auto_create_subnetworks=False,
            opts=options(self, kind="network", protect=True, aliases=aliases or ()),
        )  # fmt: skip


def test_a_rename_with_an_alias_is_no_change_and_without_one_is_blocked(tmp_path: Path) -> None:
    small = world(tmp_path)
    small.stack("dev.global", declare=declares(lambda: Fabric("one", network="before"))).up()
    renamed = declares(lambda: Fabric("one", network="after", aliases=[pulumi.Alias(name="before")]))
    assert set(small.preview("dev.global", declare=renamed).counts) == {"same"}
    bare = small.preview("dev.global", declare=declares(lambda: Fabric("one", network="after")))
    assert {one.kind for one in bare.preview.steps if one.custom} == {"create", "delete"}
    assert bare.blocks


def test_the_double_refuses_what_the_provider_does_not_have(tmp_path: Path) -> None:
    def misspelt() -> None:
        given = {"name": "net-1", "project": "example", "autoCreateSubnets": False}
        pulumi.CustomResource("gcp:compute/network:Network", "net-1", given)

    stack = world(tmp_path).stack("dev.global", declare=declares(misspelt))
    preview, _ = stack.preview()
    assert any("autoCreateSubnets" in one.message for one in preview.diagnostics)
