"""The merge against its definitions: invariants I1 to I5 and I8 of cross-region.md 7, and one trajectory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from training.sync.adopt import rebase
from training.sync.layout import Layout, fingerprint_weights
from training.sync.merge import Displacement, MergeRules, average_models, merge
from training.sync.outer import OuterState, outer_step

PLAIN = MergeRules(learning_rate=1.0, momentum=0.0, round_samples=100)
NESTEROV = MergeRules(learning_rate=0.7, momentum=0.9, round_samples=100)


def give(learner: str, delta: np.ndarray, *, samples: int = 100, staleness: int = 0) -> Displacement:
    return Displacement(learner=learner, delta=delta, samples=samples, staleness=staleness)


def draw(seed: int, size: int = 1000, dtype: type = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def test_i1_one_learner_with_plain_averaging_is_plain_training() -> None:
    """Assigning the merged weights gives the learner's own weights back, up to the rounding of one subtraction."""
    anchor, local = draw(1, 100_000, np.float32), draw(2, 100_000, np.float32)
    outer = merge(OuterState.start(anchor), [give("east", local - anchor, samples=37)], rules=PLAIN).outer
    np.testing.assert_allclose(outer.theta, local, rtol=1e-6, atol=1e-6)


def test_i2_one_step_rounds_are_data_parallel_descent() -> None:
    theta = draw(0)
    outer, reference = OuterState.start(theta), theta
    targets = [draw(10), draw(11), draw(12)]
    for _ in range(50):
        locals_ = [outer.theta - 0.1 * (outer.theta - target) for target in targets]
        outer = merge(outer, [give(str(i), one - outer.theta) for i, one in enumerate(locals_)], rules=PLAIN).outer
        reference = reference - 0.1 * np.mean([reference - target for target in targets], axis=0)
    np.testing.assert_allclose(outer.theta, reference, atol=1e-13)


def nesterov(theta: np.ndarray, gradients: list[np.ndarray], *, lr: float, mu: float) -> np.ndarray:
    """The textbook form that torch's SGD has."""
    velocity = np.zeros_like(theta)
    for gradient in gradients:
        velocity = mu * velocity + gradient
        theta = theta - lr * (gradient + mu * velocity)
    return theta


def test_i3_full_rounds_are_nesterov() -> None:
    theta, gradients = draw(0), [draw(seed) for seed in range(1, 30)]
    outer = OuterState.start(theta)
    for gradient in gradients:
        outer = merge(outer, [give("east", -gradient)], rules=NESTEROV).outer
        assert outer.rounds_accumulated == 0.0
    np.testing.assert_allclose(outer.theta, nesterov(theta, gradients, lr=0.7, mu=0.9), atol=1e-12)


def test_i4_four_quarter_contributions_are_nesterov_on_their_mean() -> None:
    theta, quarters = draw(0), [draw(seed) for seed in range(1, 41)]
    outer = OuterState.start(theta)
    for quarter in quarters:
        outer = merge(outer, [give("any", -quarter)], rules=NESTEROV, frac=0.25).outer
    means = [np.mean(quarters[start : start + 4], axis=0) for start in range(0, 40, 4)]
    np.testing.assert_allclose(outer.theta, nesterov(theta, means, lr=0.7, mu=0.9), atol=1e-12)


def test_i5_rebase_onto_the_same_weights_changes_nothing() -> None:
    theta, base = draw(1, dtype=np.float32), draw(2, dtype=np.float32)
    assert rebase(theta, onto=base, base=base).tobytes() == theta.tobytes()


def test_i8_the_order_of_arrival_does_not_matter() -> None:
    shares = [give(f"learner-{i}", draw(i, 5000, np.float32), samples=50 + 7 * i) for i in range(5)]
    start = OuterState.start(draw(99, 5000, np.float32))
    results = {merge(start, order, rules=NESTEROV).outer.theta.tobytes() for order in itertools.permutations(shares)}
    assert len(results) == 1


def test_the_sign_moves_the_weights_towards_the_learner() -> None:
    outer = merge(OuterState.start(np.zeros(3, np.float32)), [give("east", np.ones(3, np.float32))], rules=PLAIN).outer
    assert outer.theta.tolist() == [1.0, 1.0, 1.0]


def test_weights_are_capped_at_one_round() -> None:
    ones, zeros = np.ones(4), np.zeros(4)
    heavy = merge(OuterState.start(zeros), [give("a", ones, samples=900), give("b", zeros, samples=100)], rules=PLAIN)
    light = merge(OuterState.start(zeros), [give("a", ones, samples=50), give("b", zeros, samples=100)], rules=PLAIN)
    assert heavy.outer.theta[0] == 0.5
    assert light.outer.theta[0] == pytest.approx(1 / 3)


def test_a_stale_contribution_is_discounted_absolutely() -> None:
    rules = MergeRules(learning_rate=1.0, momentum=0.0, round_samples=100, soft_staleness=2)
    ones = np.ones(4)
    for staleness, expected in ((2, 1.0), (5, 0.5), (17, 0.25)):
        outer = merge(OuterState.start(np.zeros(4)), [give("a", ones, staleness=staleness)], rules=rules).outer
        assert outer.theta[0] == pytest.approx(expected)


def test_merging_leaves_the_served_weights_alone() -> None:
    start = OuterState.start(draw(0, dtype=np.float32))
    before = [array.tobytes() for array in (start.theta, start.momentum, start.accumulated)]
    merge(start, [give("east", draw(1, dtype=np.float32))], rules=NESTEROV)
    assert [array.tobytes() for array in (start.theta, start.momentum, start.accumulated)] == before


def test_two_contributions_of_one_learner_are_refused() -> None:
    with pytest.raises(ValueError, match="contributes twice"):
        merge(OuterState.start(np.zeros(2)), [give("a", np.ones(2)), give("a", np.ones(2))], rules=PLAIN)


def test_frac_outside_its_range_is_refused() -> None:
    for frac in (0.0, 1.5):
        with pytest.raises(ValueError, match="share of a full round"):
            outer_step(OuterState.start(np.zeros(2)), np.ones(2), learning_rate=1, momentum=0, frac=frac)


def test_the_lowest_cosine_shows_learners_that_pull_apart() -> None:
    right, up = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    result = merge(OuterState.start(np.zeros(2)), [give("a", right), give("b", right), give("c", up)], rules=PLAIN)
    assert result.cosine == 0.0
    assert merge(OuterState.start(np.zeros(2)), [give("a", right)], rules=PLAIN).cosine is None


def test_the_published_average_is_weighted_by_samples_in_learner_order() -> None:
    a, b = np.full(3, 1, np.float32), np.full(3, 4, np.float32)
    first = average_models([("a", a, 50), ("b", b, 100)], round_samples=100)
    second = average_models([("b", b, 100), ("a", a, 50)], round_samples=100)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(first, 3)


def test_golden_trajectory_keeps_every_bit() -> None:
    """Three barrier rounds and two half rounds from fixed numbers; changes here change every run's weights."""
    layout = Layout.from_shapes({"w": [4]})
    start = np.array([0.5, -1.25, 2.0, 0.125], np.float32)
    deltas = [np.array([0.1, -0.2, 0.3, 0.4], np.float32), np.array([-0.5, 0.25, 0.125, 1.0], np.float32)]
    rules = MergeRules(learning_rate=0.7, momentum=0.9, round_samples=64)
    outer, seen = OuterState.start(start), []
    for frac in (1.0, 1.0, 1.0, 0.5, 0.5):
        shares = [give("east", deltas[0], samples=64), give("west", deltas[1], samples=48)]
        outer = merge(outer, shares, rules=rules, frac=frac).outer
        deltas = [one * np.float32(0.5) for one in deltas]
        seen.append((outer.theta.tobytes().hex(), outer.momentum.tobytes().hex(), outer.rounds_accumulated))
    assert outer.theta.shape == (layout.total,)
    assert seen == GOLDEN
    assert len(fingerprint_weights(outer.theta)) == 64


GOLDEN = [
    ("f4fd943e4c37a1bfea26134078be7f3f", "0eea203eb00eea3b686666be843a28bf", 0.0),
    ("aa79c73da857a2bf8fe424403580e73f", "ad47613e14d7233caf47a1be1f856bbf", 0.0),
    ("1100a3bd475fa3bf8d1c35408f1e2340", "06fb723e9bb6303cb7f3adbe70067ebf", 0.0),
    ("8c14b1bd8469a3bfd5bd354099f52440", "06fb723e9bb6303cb7f3adbe70067ebf", 0.5),
    ("88556fbedb44a4bf633c4340165f4c40", "a9c4693e6e032a3c585ba7bee06474bf", 0.0),
]
