"""Invariants I6 and I7 of cross-region.md 7, and regression bounds from its appendix A: whole simulated runs of the
production merge, outer optimizer, codecs and adoption rules.

Bounds are for the mean of four seeds: single runs of the toy task differ by 0.7 %. `benchmarks.sync_toy` has more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.builders.sync_sim import FOREVER, Outcome, World, simulate
from tests.builders.toy_task import Task, ToyInner, initial_weights, make_inners, train_together
from training.sync.codec import Codec

SEEDS = range(4)
BARRIER = World()
DECOUPLED = World(mode="decoupled")
TASK = Task()


def run(world: World, *, seed: int = 0) -> Outcome:
    return simulate(initial_weights(), make_inners(TASK, seed=seed, learners=len(world.step_times)), world)


@cache
def mean_loss(world: World) -> float:
    return float(np.mean([TASK.loss(run(world, seed=seed).theta) for seed in SEEDS]))


@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("steps", [40, 200])
def test_i6_waiting_for_all_makes_decoupled_a_barrier(fragments: int, steps: int) -> None:
    """Endless grace, no latency: not close, the same bits."""
    barrier = run(replace(BARRIER, steps=steps, fragments=fragments))
    decoupled = run(replace(DECOUPLED, steps=steps, fragments=fragments, grace=FOREVER))
    assert decoupled.theta.tobytes() == barrier.theta.tobytes()
    assert len(barrier.moments) >= fragments * steps // BARRIER.inner_steps


def alone(world: World) -> Outcome:
    settings = replace(world, steps=300, step_times=(1.0,), learning_rate=1.0, momentum=0.0)
    return simulate(initial_weights(), [ToyInner(TASK, seed=0, learners=[0])], settings)


@pytest.mark.parametrize("latency", [0.0, 7.5, 15.0])
def test_i7_one_learner_with_rebase_is_plain_training(latency: float) -> None:
    """Whatever the latency, up to rounding. Overwriting loses what was made meanwhile."""
    plain = train_together(TASK, seed=0, steps=300, learners=1)
    found = alone(replace(DECOUPLED, latency=latency))
    assert TASK.loss(found.theta) == pytest.approx(TASK.loss(plain), rel=1e-4)
    assert found.lost_steps == 0
    if latency:
        overwritten = alone(replace(DECOUPLED, latency=latency, adopt="overwrite"))
        assert overwritten.lost_steps > 100
        assert TASK.loss(overwritten.theta) > 1.02 * TASK.loss(plain)


@pytest.mark.parametrize("world", [BARRIER, replace(DECOUPLED, latency=2.5, step_times=(1.0, 1.3, 2.6, 5.7))])
@pytest.mark.parametrize("fragments", [1, 3])
def test_all_end_with_the_same_bits_and_nothing_is_lost(world: World, fragments: int) -> None:
    outcome = run(replace(world, steps=100, fragments=fragments))
    assert {one.tobytes() for one in outcome.learners} == {outcome.theta.tobytes()}
    assert outcome.lost_steps == 0


def test_barrier_is_as_good_as_data_parallel() -> None:
    together = float(np.mean([TASK.loss(train_together(TASK, seed=seed, steps=800)) for seed in SEEDS]))
    assert mean_loss(BARRIER) < 1.01 * together


def test_rebase_hides_the_latency() -> None:
    """2 x 2.5 steps of 20."""
    assert mean_loss(replace(DECOUPLED, latency=2.5)) < 1.01 * mean_loss(DECOUPLED)


def test_momentum_for_each_contribution_diverges() -> None:
    """Why the momentum is delayed to a full round."""
    wrong = run(replace(DECOUPLED, latency=2.5, momentum_per_contribution=True))
    assert TASK.loss(wrong.theta) > 1.5 * mean_loss(DECOUPLED)


@pytest.mark.parametrize(("codec", "share"), [("bf16", 0.5), ("int8", 0.254)])
def test_lossy_forms_cost_bytes_not_loss(codec: Codec, share: float) -> None:
    lossy = replace(BARRIER, codec=codec)
    assert mean_loss(lossy) < 1.02 * mean_loss(BARRIER)
    ratio = run(replace(lossy, steps=40)).bytes_sent / run(replace(BARRIER, steps=40)).bytes_sent
    assert ratio == pytest.approx(share, abs=0.001)
