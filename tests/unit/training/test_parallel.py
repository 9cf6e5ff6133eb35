"""Meshes, flat ranges and small agreements, in a group of one; more ranks are in test_step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spec.errors import ConfigError
from tests.builders.worlds import make_learner
from training.models.dit import DiT
from training.models.network import initialise
from training.parallel import (
    add_part,
    assign_local,
    assign_part,
    broadcast_json,
    close_process_group,
    copy_part,
    flat_ranges,
    gather_local,
    init_process_group,
    is_primary_replica,
    lowest_rank_where,
    make_mesh,
    replica_count,
)


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    init_process_group(
        0, world_size=1, init_method=f"file://{tmp_path}/store", device=torch.device("cpu"), timeout_seconds=20
    )
    yield
    close_process_group()


def test_a_sharded_model_of_one_rank_holds_everything_in_order_of_names() -> None:
    mesh, model, _, _, config = make_learner(1)
    plain = initialise(DiT(config.model), seed=config.seed)
    ranges = flat_ranges(model)
    assert [one.name for one in ranges] == sorted(name for name, _ in plain.named_parameters())
    assert all(one.start == 0 and one.length == one.parameter.numel() for one in ranges)
    assert gather_local(model).equal(gather_local(plain)), "sharding does not change the initial weights"
    assert is_primary_replica(mesh)
    assert replica_count(model) == 1
    assert model.position.equal(plain.position)


def test_assigned_elements_are_what_the_model_computes_with() -> None:
    _, model, _, _, config = make_learner(1)
    other = initialise(DiT(config.model), seed=99)
    with torch.no_grad():
        other.final.weight.fill_(0.25)
    assign_local(model, gather_local(other))
    inputs = (torch.ones(2, 1, 8, 8), torch.tensor([0.1, 0.9]), torch.ones(2, 16), torch.tensor([False, True]))
    with torch.no_grad():
        assert model(*inputs).equal(other(*inputs))


def test_a_part_of_the_elements_is_read_and_written_across_tensors() -> None:
    _, model, _, _, _ = make_learner(1)
    whole = gather_local(model)
    first, stop = 100, len(whole) - 50
    part = torch.empty(stop - first)
    copy_part(model, part, first=first)
    assert part.equal(whole[first:stop])
    add_part(model, torch.ones(stop - first), first=first)
    assert gather_local(model).equal(torch.cat([whole[:first], whole[first:stop] + 1, whole[stop:]]))
    assign_part(model, part, first=first)
    assert gather_local(model).equal(whole)


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="shard_size 3 does not divide the 8 ranks"):
        make_mesh(8, shard_size=3, device_type="cpu")


def test_json_travels_and_the_lowest_rank_is_found() -> None:
    assert broadcast_json({"a": [1, "ü", None]}) == {"a": [1, "ü", None]}
    assert broadcast_json("") == ""
    assert lowest_rank_where(False) is None
    assert lowest_rank_where(True) == 0
