"""The stacks that the repository ships are accepted, alone and together, and are the example the issue asks for."""

from __future__ import annotations

import re

import pytest

from spec.problems import DocumentError
from spec.stack import (
    GlobalStack,
    PlatformStack,
    RegionStack,
    check_all,
    check_stack,
    parse_stack_name,
    read_stack,
    upstream,
)
from tests.builders.stack_files import NAMES, problems_between, shipped, stack_text


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_stack_is_accepted_alone(name: str) -> None:
    found = shipped(name)
    assert found.value.kind == parse_stack_name(name).kind
    assert check_stack(found.value, name=name) == []


def test_the_shipped_stacks_are_accepted_together() -> None:
    assert check_all({name: shipped(name).value for name in NAMES}) == []
    assert problems_between() == []


def test_every_environment_is_complete() -> None:
    names = [parse_stack_name(name) for name in NAMES]
    for one in names:
        assert f"{one.environment}.global" in NAMES
        if one.kind == "region":
            assert f"{one}.platform" in NAMES


def test_production_has_ten_thousand_gpus_of_two_kinds() -> None:
    regions = [one.value for one in map(shipped, NAMES) if isinstance(one.value, RegionStack) and one.value.protect]
    gpus = {pool.row.gpu: 0 for one in regions for pool in one.gpu_pools}
    for one in regions:
        for pool in one.gpu_pools:
            gpus[pool.row.gpu] += one.nodes_now(pool) * pool.row.gpus
    assert gpus == {"H100-MEGA": 4880, "H200": 5120}


def test_a_reservation_that_is_not_delivered_gives_a_pool_of_no_nodes() -> None:
    before = shipped("prod.us-central1").value
    after = shipped("prod.us-central1", "reservations[1].delivered=true").value
    assert isinstance(before, RegionStack)
    assert isinstance(after, RegionStack)
    assert [before.nodes_now(pool) for pool in before.gpu_pools] == [610, 0]
    assert [after.nodes_now(pool) for pool in after.gpu_pools] == [610, 64]


def test_a_pool_takes_over_its_reservations_maintenance_interval_and_its_stacks_protection() -> None:
    region = shipped("prod.us-central1", "gpu_pools.mega-2.protect=false").value
    assert isinstance(region, RegionStack)
    assert [region.maintenance_interval(pool) for pool in region.gpu_pools] == ["PERIODIC", "PERIODIC"]
    assert [region.protects(pool) for pool in region.gpu_pools] == [True, False]
    spot = shipped("dev.us-east4").value
    assert isinstance(spot, RegionStack)
    assert [spot.maintenance_interval(pool) for pool in spot.gpu_pools] == [None, None]


def test_what_is_left_out_comes_from_the_machines_row() -> None:
    ultra, mega = shipped("prod.us-east5").value, shipped("prod.us-central1").value
    assert isinstance(ultra, RegionStack)
    assert isinstance(mega, RegionStack)
    assert (ultra.gpu_pools[0].disk, ultra.mtu("a3-ultra")) == ("hyperdisk-balanced", 8896)
    assert (mega.gpu_pools[0].disk, mega.mtu("a3-mega")) == ("pd-balanced", 8244)


def test_references_point_downward_only() -> None:
    layers = {"global": 0, "region": 1, "platform": 2}
    for name in NAMES:
        config = shipped(name).value
        below = upstream(config)
        if isinstance(config, GlobalStack):
            assert below == ""
            continue
        assert layers[shipped(below).value.kind] == layers[config.kind] - 1


def test_two_region_files_are_all_that_a_new_region_takes() -> None:
    """No shipped file names another region, so a region is added without touching any of them."""
    regions = {parse_stack_name(name).region for name in NAMES} - {""}
    for name in NAMES:
        own = parse_stack_name(name).region
        if not own:
            continue
        mentioned = {one for one in regions - {own} if re.search(rf"\b{one}\b", stack_text(name))}
        assert mentioned == set(), name


@pytest.mark.parametrize("name", NAMES)
def test_a_program_reads_the_same_from_the_engine_as_from_the_file(name: str) -> None:
    plain = shipped(name).tree.plain()
    assert read_stack(plain, name).value == shipped(name).value


def test_a_defect_in_what_the_engine_hands_over_names_the_file_to_mend() -> None:
    plain = shipped("prod.us-east5").tree.plain()
    assert isinstance(plain, dict)
    with pytest.raises(DocumentError) as caught:
        read_stack(plain | {"region": "us-east4"}, "prod.us-east5")  # pyright: ignore[reportUnknownArgumentType]
    assert caught.value.problems[0].file.startswith("stacks/Pulumi.prod.us-east5.yaml")
    assert caught.value.problems[0].path == "region"


def test_no_platform_hides_a_queue_for_gpus() -> None:
    for name in NAMES:
        config = shipped(name).value
        if isinstance(config, PlatformStack):
            assert config.kueue.queues[0].name == "research"
