"""The objective and the sampler, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from training.models import flow


def test_loss_is_zero_for_the_true_velocity_and_per_sample_otherwise() -> None:
    draw = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, 4, 1, 4, 4, generator=draw).unbind(0)
    time, drop = torch.rand(4, generator=draw), torch.zeros(4, dtype=torch.bool)

    def true(_images: Tensor, _time: Tensor, _condition: Tensor, _drop: Tensor) -> Tensor:
        return images - noise

    def off_in_one(*arguments: Tensor) -> Tensor:
        return true(*arguments) + torch.tensor([0.0, 2.0, 0.0, 0.0])[:, None, None, None]

    assert not flow.loss(true, images=images, noise=noise, time=time, condition=time, drop=drop).any()
    losses = flow.loss(off_in_one, images=images, noise=noise, time=time, condition=time, drop=drop)
    torch.testing.assert_close(losses, torch.tensor([0.0, 4.0, 0.0, 0.0]))


def test_the_path_runs_from_noise_to_the_image() -> None:
    seen: list[Tensor] = []

    def spy(images: Tensor, _time: Tensor, _condition: Tensor, _drop: Tensor) -> Tensor:
        seen.append(images)
        return images

    images, noise = torch.ones(3, 1, 2, 2), torch.full((3, 1, 2, 2), -1.0)
    time = torch.tensor([0.0, 0.25, 1.0])
    flow.loss(spy, images=images, noise=noise, time=time, condition=time, drop=time.bool())
    assert seen[0][:, 0, 0, 0].tolist() == [-1.0, -0.5, 1.0]


@pytest.mark.parametrize("steps", [1, 5])
def test_sampling_a_straight_flow_is_exact_with_any_number_of_steps(steps: int) -> None:
    noise, target = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 4, 4)

    def straight(_images: Tensor, _time: Tensor, _condition: Tensor, _drop: Tensor) -> Tensor:
        return target - noise

    images = flow.sample(straight, noise=noise, condition=torch.zeros(2), steps=steps, guidance=1.0)
    torch.testing.assert_close(images, target)


def test_guidance_moves_away_from_the_unconditional_velocity_in_one_batch() -> None:
    batches: list[int] = []

    def told_is_one_untold_a_half(images: Tensor, _time: Tensor, _condition: Tensor, drop: Tensor) -> Tensor:
        batches.append(images.shape[0])
        return torch.where(drop, 0.5, 1.0)[:, None, None, None].expand_as(images)

    noise, condition = torch.zeros(3, 1, 2, 2), torch.zeros(3)
    reached = {
        guidance: flow.sample(told_is_one_untold_a_half, noise=noise, condition=condition, steps=4, guidance=guidance)
        for guidance in (0.0, 1.0, 3.0)
    }
    assert {guidance: float(images[0, 0, 0, 0]) for guidance, images in reached.items()} == {
        0.0: 0.5,
        1.0: 1.0,
        3.0: 2.0,
    }
    assert batches == [6] * 4 + [3] * 4 + [6] * 4


@pytest.mark.parametrize(("sampler", "calls", "order"), [("euler", 1, 1), ("midpoint", 2, 2), ("heun", 2, 2)])
def test_a_samplers_error_falls_with_its_order(sampler: str, calls: int, order: int) -> None:
    """dx/dt = x - t, whose solution from x(0) = 1/2 is x(1) = 2 - e / 2."""
    asked: list[float] = []

    def field(images: Tensor, time: Tensor, _condition: Tensor, _drop: Tensor) -> Tensor:
        asked.append(float(time[0]))
        return (images - time[:, None, None, None]).double()

    def error(steps: int) -> float:
        noise = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
        found = flow.sample(field, noise=noise, condition=torch.zeros(1), steps=steps, guidance=1.0, sampler=sampler)
        return abs(float(found) - (2 - math.e / 2))

    coarse, fine = error(8), error(16)
    assert len(asked) == calls * (8 + 16)
    assert 2**order * 0.8 < coarse / fine < 2**order * 1.25


def test_guidance_acts_only_in_its_interval_and_costs_only_there() -> None:
    rows: list[tuple[float, int]] = []

    def field(images: Tensor, time: Tensor, _condition: Tensor, drop: Tensor) -> Tensor:
        rows.append((float(time[0]), images.shape[0]))
        return torch.where(drop, 0.0, 1.0)[:, None, None, None].expand_as(images)

    images = flow.sample(
        field, noise=torch.zeros(3, 1, 1, 1), condition=torch.zeros(3), steps=4, guidance=3.0, guided_times=(0.25, 0.6)
    )
    assert rows == [(0.0, 3), (0.25, 6), (0.5, 6), (0.75, 3)]
    assert images.flatten().tolist() == [(1 + 3 + 3 + 1) / 4] * 3
