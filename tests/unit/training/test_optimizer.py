"""The learning rate as a function of samples, and AdamW against torch's own on whole tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec.train import ModelConfig, TrainConfig
from training.models.dit import DiT
from training.models.network import initialise
from training.optimizer import ShardedAdamW, learning_rate

CONFIG = TrainConfig(samples=10_000, warmup_samples=1_000, batch=100, learning_rate=1e-2, final_learning_rate_share=0.1)


def test_rate_rises_from_one_batch_to_the_peak_then_falls_to_its_final_share() -> None:
    assert learning_rate(CONFIG, samples=0) == pytest.approx(1e-3)
    assert learning_rate(CONFIG, samples=400) == pytest.approx(5e-3)
    assert learning_rate(CONFIG, samples=1_000) == pytest.approx(1e-2)
    assert learning_rate(CONFIG, samples=5_500) == pytest.approx(1e-2 * (0.1 + 0.9 * 0.5))
    assert learning_rate(CONFIG, samples=10_000) == pytest.approx(1e-3)
    assert learning_rate(CONFIG, samples=99_999) == pytest.approx(1e-3)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(CONFIG.model_copy(update={"warmup_samples": 0}), samples=0) == pytest.approx(1e-2)


def test_a_run_that_ends_during_its_warm_up_has_a_rate() -> None:
    assert learning_rate(CONFIG.model_copy(update={"samples": 500}), samples=1_000) == pytest.approx(1e-3)


@given(samples=st.integers(0, 30_000), warmup=st.integers(0, 12_000), batch=st.integers(1, 4_000))
def test_rate_stays_between_nothing_and_the_peak(samples: int, warmup: int, batch: int) -> None:
    config = CONFIG.model_copy(update={"warmup_samples": warmup, "batch": batch})
    assert 0 < learning_rate(config, samples=samples) <= config.learning_rate


def _model() -> DiT:
    model = initialise(DiT(ModelConfig(width=16, depth=1, heads=2, text_width=8)), seed=1)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    return model


def test_update_equals_torchs_adamw_with_decay_on_matrices_only() -> None:
    config = CONFIG.model_copy(update={"weight_decay": 0.5})
    ours, theirs = _model(), _model()
    matrices = [parameter for parameter in theirs.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=config.betas)
    optimizer = ShardedAdamW(ours, config=config)
    for _ in range(3):
        norm = float(optimizer.gradient_norm())
        optimizer.step(learning_rate=3e-3, gradient_norm=norm, gradient_clip=1.0)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        reference.step()
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    assert optimizer.steps == 3


def test_restored_moments_go_on_bit_for_bit() -> None:
    straight, resumed = _model(), _model()
    optimizer = ShardedAdamW(straight, config=CONFIG)
    for _ in range(4):
        optimizer.gradient_norm()
        optimizer.step(learning_rate=1e-2, gradient_norm=0.5, gradient_clip=1.0)
        if optimizer.steps == 2:
            saved = (optimizer.exp_avg.clone(), optimizer.exp_avg_sq.clone())
            resumed.load_state_dict(straight.state_dict())
    second = ShardedAdamW(resumed, config=CONFIG)
    second.restore(steps=2, exp_avg=saved[0], exp_avg_sq=saved[1])  # pyright: ignore[reportPossiblyUnboundVariable]
    for _ in range(2):
        second.gradient_norm()
        second.step(learning_rate=1e-2, gradient_norm=0.5, gradient_clip=1.0)
    assert all(one.equal(two) for one, two in zip(straight.parameters(), resumed.parameters(), strict=True))
    assert second.exp_avg_sq.equal(optimizer.exp_avg_sq)


def test_a_step_after_zero_grad_changes_nothing() -> None:
    model = _model()
    optimizer = ShardedAdamW(model, config=CONFIG)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    assert float(optimizer.gradient_norm()) == 0.0
    optimizer.step(learning_rate=1.0, gradient_norm=0.0, gradient_clip=1.0)
    assert all(parameter.equal(old) for parameter, old in zip(model.parameters(), before, strict=True))
