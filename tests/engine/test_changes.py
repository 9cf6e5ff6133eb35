"""What changes to a region do, as the real engine sees them: a production region that is up, changed in many ways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.components.gcp import gpu_pool
from infra.review.comment import comment
from spec.errors import EXIT_OK, EXIT_REFUSED, RefusedError
from spec.stack_region import RegionStack
from tests.builders.engine import World, changed, step, world
from tests.builders.stack_files import shipped

pytestmark = pytest.mark.engine
REGION = "prod.us-east5"
KEY = "LS0tbm90LWEtcmVhbC1rZXktYnV0LXNlY3JldC0tLQ=="


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Production's global stack and one region, up; its cluster hands out a secret key."""
    found = world(tmp_path_factory.mktemp("prod"))
    found.cloud.set_faults(client_key=KEY)
    found.stack("prod.global").up()
    found.stack(REGION).up()
    return found


def test_a_second_preview_has_no_change(up: World) -> None:
    found = up.preview(REGION)
    assert set(found.counts) <= {"same", "read"}
    assert found.counts["same"] > 30
    assert found.exit_code == EXIT_OK


def test_a_changed_node_count_is_an_update(up: World) -> None:
    found = up.preview(REGION, "gpu_pools[0].nodes=300")
    pool = step(found, "ultra-1")
    assert pool.kind == "update"
    assert list(pool.detailed) == ["nodeCount"]
    assert found.exit_code == EXIT_OK
    assert [(one.before, one.after) for one in found.gpus.values()] == [(2560, 2400), (2560, 2560)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("driver=DEFAULT", "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig.gpuDriverVersion"),
        (
            "capacity.reservation=projects/example-gkr-prod/reservations/ultra-east5/reservationBlocks/other-block",
            "nodeConfig.reservationAffinity.values[0]",
        ),
        ("max_pods_per_node=64", "maxPodsPerNode"),
    ],
)
def test_what_replaces_a_pool_is_shown_and_blocked(up: World, change: str, field: str) -> None:
    found = up.preview(REGION, f"gpu_pools[0].{change}")
    pool = step(found, "ultra-1")
    assert pool.kind == "replace"
    assert pool.detailed[field] == "update-replace"
    assert found.exit_code == EXIT_REFUSED
    assert field in comment(found)
    assert step(found, "ultra-2").kind == "same"


def test_another_order_of_networks_replaces_the_pools_and_is_blocked(up: World) -> None:
    before = gpu_pool._networks

    def turned(args: gpu_pool.GpuPoolArgs) -> Any:
        return before(replace(args, attachments=[*args.attachments][::-1]))

    with changed(gpu_pool, "_networks", turned):
        found = up.preview(REGION)
    assert {step(found, name).kind for name in ("ultra-1", "ultra-2")} == {"replace"}
    assert found.exit_code == EXIT_REFUSED


def test_another_boot_disk_makes_every_node_anew_and_is_blocked(up: World) -> None:
    found = up.preview(REGION, "gpu_pools[0].boot_disk.size_gb=300")
    assert step(found, "ultra-1").kind == "update"
    assert [one.step.name for one in found.restarts] == ["ultra-1"]
    assert [one.label for one in found.blocks] == ["allow-loss"]


def test_a_removed_pool_is_refused_while_it_is_protected(up: World) -> None:
    pools = shipped(REGION).value
    assert isinstance(pools, RegionStack)
    kept = pools.gpu_pools[0].model_dump(mode="json", exclude_unset=True)
    found = up.preview(REGION, f"gpu_pools={json.dumps([kept])}", labels=("allow-loss",))
    assert step(found, "ultra-2").kind == "delete"
    assert found.exit_code == EXIT_REFUSED
    with pytest.raises(RefusedError, match="protect"):
        up.stack(REGION, f"gpu_pools={json.dumps([kept])}").up()
    assert any(identity.endswith("/nodePools/ultra-2") for _, identity in up.cloud.things())


def test_what_is_secret_is_in_no_output_state_or_preview_in_clear_text(up: World) -> None:
    stack = up.stack(REGION)
    preview, digest = stack.preview()
    assert preview.steps
    texts = {"state": json.dumps(stack.state()), "preview": json.dumps(digest), "outputs": json.dumps(stack.outputs())}
    assert {name for name, text in texts.items() if KEY in text} == set()
    made = [path.read_text(encoding="utf-8") for path in (up.place.cloud / "things").iterdir()]
    assert any(KEY in text for text in made), "no secret was made"
    files = [path for path in (up.place.folder / "state").rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_taking_down_what_is_protected_is_refused(up: World) -> None:
    with pytest.raises(RefusedError, match="protect"):
        up.stack(REGION).down()
