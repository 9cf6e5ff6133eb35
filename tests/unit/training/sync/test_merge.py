"""The merge against its definitions: invariants I1 to I5 and I8 of cross-region.md 7, and its wire forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from training.sync.adopt import rebase
from training.sync.codec import Codec, decode, encode
from training.sync.layout import gather
from training.sync.merge import (
    PIECE,
    Displacement,
    MergeRules,
    average_models,
    follow,
    measure_norm,
    merge,
)
from training.sync.outer import OuterState, Spare
from training.sync.pieces import Part, Parts, Raised, Source

PLAIN = MergeRules(learning_rate=1.0, momentum=0.0, round_samples=100)
NESTEROV = MergeRules(learning_rate=0.7, momentum=0.9, round_samples=100)


def give(learner: str, delta: Source, *, samples: int = 100, staleness: int = 0) -> Displacement:
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


def test_what_cannot_be_merged_is_refused() -> None:
    start = OuterState.start(np.zeros(2))
    for frac in (0.0, 1.5):
        with pytest.raises(ValueError, match="share of a full round"):
            merge(start, [give("a", np.ones(2))], rules=PLAIN, frac=frac)
    with pytest.raises(ValueError, match="at least one contribution"):
        merge(start, [], rules=PLAIN)
    with pytest.raises(ValueError, match="contributes 3 elements to 2"):
        merge(start, [give("a", np.ones(3))], rules=PLAIN)
    with pytest.raises(ValueError, match="nothing to contribute"):
        merge(start, [give("a", np.ones(2), samples=0)], rules=PLAIN)


def by_the_formula(
    outer: OuterState, deltas: dict[str, np.ndarray], shares: dict[str, float], *, frac: float
) -> OuterState:
    """8.3 written down plainly, whole arrays at a time, in the arrays' own precision."""
    largest = max(shares.values())
    a, b, c = (deltas[name] * (shares[name] / largest) for name in sorted(deltas))
    gradient = ((a + b) + c) * -largest * frac
    accumulated, rounds = outer.accumulated + gradient, outer.rounds_accumulated + frac
    if rounds < 1 - 1e-9:
        theta = outer.theta - gradient * 0.7
        return OuterState(theta=theta, momentum=outer.momentum, accumulated=accumulated, rounds_accumulated=rounds)
    velocity = outer.momentum * 0.9 + accumulated / rounds
    theta = outer.theta - (velocity * 0.9 + gradient) * 0.7
    return OuterState(theta=theta, momentum=velocity, accumulated=accumulated * 0)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_bit_is_what_the_formula_gives(threads: int) -> None:
    """Over several pieces, equal and unequal weights, full and partial rounds, with spare arrays, on any threads."""
    size, names = 2 * PIECE + 77, ("a", "b", "c")
    outer = want = OuterState.start(draw(0, size, np.float32))
    spare = Spare()
    for number, frac in enumerate((1.0, 0.25, 0.5, 0.5, 1.0, 1.0)):
        deltas = {name: draw(10 * number + i, size, np.float32) for i, name in enumerate(names)}
        samples = {name: 100 if number % 2 else 40 + 25 * i for i, name in enumerate(names)}
        shares = {name: samples[name] / sum(samples.values()) for name in names}
        want = by_the_formula(want, deltas, shares, frac=frac)
        given = [give(name, deltas[name], samples=samples[name]) for name in reversed(names)]
        before, outer = outer, merge(outer, given, rules=NESTEROV, frac=frac, spare=spare, threads=threads).outer
        for found, wanted in zip(parts_of(outer), parts_of(want), strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert outer.rounds_accumulated == want.rounds_accumulated
        spare.give(*(one for one in parts_of(before) if not any(one is other for other in parts_of(outer))))


def parts_of(outer: OuterState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return outer.theta, outer.momentum, outer.accumulated


def test_spare_arrays_are_used_and_kept_ones_are_not() -> None:
    spare = Spare()
    first = OuterState.start(draw(0, 10, np.float32))
    second = merge(first, [give("a", draw(1, 10, np.float32))], rules=NESTEROV, frac=0.5, spare=spare).outer
    assert second.momentum is first.momentum
    spare.give(first.theta, first.accumulated)
    third = merge(second, [give("a", draw(2, 10, np.float32))], rules=NESTEROV, frac=0.25, spare=spare).outer
    assert {id(third.theta), id(third.accumulated)} == {id(first.theta), id(first.accumulated)}
    assert third.momentum is second.momentum


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_wire_forms_merge_like_their_decoded_values(codec: Codec) -> None:
    """Two ranks with interleaved ranges of a fragment that begins inside the model."""
    start, length = 1000, 2 * PIECE + 500
    ranges = [[(start, 10), (start + 600, PIECE)], [(start + 10, 590), (start + 600 + PIECE, PIECE - 100)]]
    flat = draw(5, start + length, np.float32)
    wires = [encode(gather(flat, one), codec) for one in ranges]
    decoded = flat.copy()
    for wire, one in zip(wires, ranges, strict=True):
        values = np.empty(sum(size for _, size in one), np.float32)
        decode(wire.data, values, codec)
        for first, size in one:
            decoded[first : first + size], values = values[:size], values[size:]
    given = [Part(data=wire.data, ranges=one, codec=codec) for wire, one in zip(wires, ranges, strict=True)]
    encoded = Parts(given, start=start, length=length)
    outer = OuterState.start(draw(6, length, np.float32))
    other = give("west", draw(7, length, np.float32), samples=60)
    found = merge(outer, [give("east", encoded), other], rules=NESTEROV)
    want = merge(outer, [give("east", decoded[start:]), other], rules=NESTEROV)
    assert found.outer.theta.tobytes() == want.outer.theta.tobytes()
    assert (found.gradient_norm, found.cosine) == (want.gradient_norm, want.cosine)
    assert measure_norm(encoded) == measure_norm(decoded[start:])
    base = draw(8, length, np.float32)
    raised = average_models([("east", Raised(base=base, displacement=encoded), 100)], round_samples=100)
    assert raised.tobytes() == (base + decoded[start:]).tobytes()


def test_parts_that_leave_a_gap_are_refused() -> None:
    part = Part(data=memoryview(bytes(40)), ranges=[(0, 10)], codec="fp32")
    with pytest.raises(ValueError, match="elements 10 to 11 are missing"):
        Parts([part], start=0, length=12)
    with pytest.raises(ValueError, match="element 0 is covered twice"):
        Parts([part, part], start=0, length=10)


def test_buffers_move_by_the_weighted_mean_alone() -> None:
    start = OuterState.start(np.zeros(6, np.float32))
    rises = [np.full(6, 1, np.float32), np.full(6, 3, np.float32)]
    shares = [give("a", rises[0]), give("b", rises[1])]
    once = merge(start, shares, rules=NESTEROV, trainable=4).outer
    assert once.theta[4:].tolist() == [2.0, 2.0]
    twice = merge(once, shares, rules=NESTEROV, trainable=4).outer
    assert twice.theta[4:].tolist() == [4.0, 4.0]
    assert not twice.momentum[4:].any()
    assert not twice.accumulated[4:].any()
    np.testing.assert_array_equal(
        twice.theta[:4], merge(merge(start, shares, rules=NESTEROV).outer, shares, rules=NESTEROV).outer.theta[:4]
    )
    half = merge(start, shares, rules=NESTEROV, trainable=0, frac=0.5).outer
    assert half.theta.tolist() == [1.0] * 6


def test_norms_see_what_is_not_finite_and_survive_what_is_large() -> None:
    large = np.full(10, 1e30, np.float32)
    assert measure_norm(large) == pytest.approx(1e30 * np.sqrt(10))
    for bad in (np.nan, np.inf):
        broken = draw(0, 3 * PIECE, np.float32)
        broken[-1] = bad
        assert not np.isfinite(measure_norm(broken))
        assert not np.isfinite(
            merge(OuterState.start(np.ones_like(broken)), [give("a", broken)], rules=PLAIN).gradient_norm
        )


def test_the_syncers_own_average_follows_the_versions() -> None:
    average, theta = np.zeros(3), np.ones(3)
    np.testing.assert_allclose(follow(average, theta, decay=0.9), 0.1)
    room = np.empty(3)
    assert follow(average, theta, decay=0.0, out=room) is room
    np.testing.assert_allclose(room, theta)


def test_the_lowest_cosine_shows_learners_that_pull_apart() -> None:
    right, up = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    result = merge(OuterState.start(np.zeros(2)), [give("a", right), give("b", right), give("c", up)], rules=NESTEROV)
    assert (result.cosine, result.mean_cosine, result.momentum_cosine) == (0.0, pytest.approx(1 / 3), None)
    again = merge(result.outer, [give("a", right)], rules=NESTEROV)
    assert (again.cosine, again.mean_cosine) == (None, None)
    assert again.momentum_cosine == pytest.approx(2 / np.sqrt(5))


def test_the_published_average_is_weighted_by_samples_in_learner_order() -> None:
    a, b = np.full(3, 1, np.float32), np.full(3, 4, np.float32)
    first = average_models([("a", a, 50), ("b", b, 100)], round_samples=100)
    second = average_models([("b", b, 100), ("a", a, 50)], round_samples=100)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(first, 3)
