"""World sizes 1, 2 and 4, and 4 as 2 x 2, take the same steps: real ranks over gloo.

Stated tolerance: in float32 losses, gradient norms and weights after ten steps agree to 1e-5 relative (the order of
sums differs, nothing else); with bfloat16 compute losses agree to 1e-3, since every rank rounds its own slice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders.worlds import make_learner, run_steps, run_worlds, whole
from training.parallel import close_process_group, gather_local, init_process_group
from training.step import train_step
from training.step_batch import ImageBatch


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ten steps of a batch of 14, which neither 4 ranks nor the model's rows divide."""
    labels = ["1", "2", "4", "2x2", "1:bfloat16", "2x2:bfloat16"]
    return run_worlds("steps", tmp_path_factory.mktemp("worlds"), worlds=labels, batch=14, count=10)


@pytest.mark.parametrize("label", ["2", "4", "2x2"])
def test_losses_and_gradient_norms_do_not_depend_on_the_world(worlds: dict[str, Any], label: str) -> None:
    alone, together = np.array(worlds["1-0"]["results"]), np.array(worlds[f"{label}-0"]["results"])
    assert alone[0, 0] > 1.15 * alone[-1, 0], "ten steps should learn something"
    np.testing.assert_allclose(together, alone, rtol=1e-5)


@pytest.mark.parametrize("label", ["2", "4", "2x2"])
@pytest.mark.parametrize("key", ["weights", "ema"])
def test_weights_and_average_do_not_depend_on_the_world(worlds: dict[str, Any], label: str, key: str) -> None:
    alone, together = whole(worlds, "1", key), whole(worlds, label, key)
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("label", ["2", "4", "2x2"])
def test_initial_weights_are_bit_equal_in_every_world(worlds: dict[str, Any], label: str) -> None:
    alone, together = whole(worlds, "1", "initial"), whole(worlds, label, "initial")
    assert all((together[name] == value).all() for name, value in alone.items())


def test_all_ranks_of_a_world_see_the_same_numbers(worlds: dict[str, Any]) -> None:
    for label, size in (("2", 2), ("4", 4), ("2x2", 4)):
        assert all(worlds[f"{label}-{rank}"]["results"] == worlds[f"{label}-0"]["results"] for rank in range(size))


def test_replicas_hold_bit_equal_weights(worlds: dict[str, Any]) -> None:
    assert [worlds[f"2x2-{rank}"]["primary"] for rank in range(4)] == [True, True, False, False]
    for rank in (0, 1):
        assert worlds[f"2x2-{rank}"]["weights"] == worlds[f"2x2-{rank + 2}"]["weights"]


def test_bfloat16_compute_agrees_within_its_rounding(worlds: dict[str, Any]) -> None:
    exact, alone, together = (
        np.array(worlds[f"{label}-0"]["results"])[:, 0] for label in ("1", "1:bfloat16", "2x2:bfloat16")
    )
    np.testing.assert_allclose(together, alone, rtol=1e-3)
    np.testing.assert_allclose(alone, exact, rtol=2e-2)
    assert (alone != exact).any(), "it did compute in bfloat16"


def test_ranks_that_work_on_different_batches_are_named_before_anything_changes(tmp_path: Path) -> None:
    found = run_worlds("apart", tmp_path)
    said = "of 3 ranks, those with the numbers 2 worked on another batch than the others"
    assert list(found.values()) == [{"said": said, "changed": False}] * 3


@pytest.fixture
def group(tmp_path: Path) -> Any:
    """A process group of this process alone."""
    init_process_group(
        0, world_size=1, init_method=f"file://{tmp_path}/store", device=torch.device("cpu"), timeout_seconds=20
    )
    yield os.getpid()
    close_process_group()


@pytest.mark.usefixtures("group")
def test_a_step_that_is_not_finite_changes_nothing() -> None:
    _, network, optimizer, ema, config = make_learner(1)
    run_steps(0, 1, network=network, optimizer=optimizer, ema=ema, config=config, first=0, count=2)
    before = (gather_local(network), ema.vector.clone(), optimizer.exp_avg.clone())
    images = torch.zeros(config.batch, 1, 8, 8)
    images[3, 0, 2, 2] = float("nan")
    batch = ImageBatch(
        images=images,
        noise=torch.zeros_like(images),
        time=torch.zeros(config.batch),
        condition=torch.zeros(config.batch, 16),
        drop=torch.zeros(config.batch, dtype=torch.bool),
    )
    done = train_step(
        network, optimizer=optimizer, ema=ema, batch=batch, config=config, learning_rate=1e-2, samples=config.batch
    )
    assert not done.applied
    assert not np.isfinite(done.loss)
    after = (gather_local(network), ema.vector, optimizer.exp_avg)
    assert all(old.equal(new) for old, new in zip(before, after, strict=True))
    run_steps(0, 1, network=network, optimizer=optimizer, ema=ema, config=config, first=2, count=1)
