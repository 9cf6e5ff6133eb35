"""The network: shapes, initial weights, conditioning, and that it starts as nothing but its last layer."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from spec.train import ModelConfig
from training.models import flow
from training.models.dit import Block, DiT
from training.models.network import initialise, sinusoids

SMALL = ModelConfig(width=32, depth=2, heads=2, text_width=16)


def _inputs(config: ModelConfig, *, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch, config.channels, config.image_size, config.image_size, generator=draw)
    condition = torch.randn(batch, config.text_width, generator=draw)
    if config.conditioning == "class":
        condition = torch.arange(batch) % config.num_classes
    return images, torch.rand(batch, generator=draw), condition, torch.zeros(batch, dtype=torch.bool)


def _stirred(config: ModelConfig) -> DiT:
    """A model none of whose weights is zero, so that every path shows."""
    model = initialise(DiT(config), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return model


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL.model_copy(update={"conditioning": "class"}),
        SMALL.model_copy(update={"channels": 3, "image_size": 12, "patch_size": 3}),
        ModelConfig(
            width=18, depth=1, heads=3, text_width=4
        ),  # a width that the position's two axes do not share evenly
    ],
)
def test_velocity_has_the_shape_of_the_images(config: ModelConfig) -> None:
    images, time, condition, drop = _inputs(config)
    assert _stirred(config)(images, time, condition, drop).shape == images.shape


def test_the_digits_model_has_the_parameters_its_recipe_counts_on() -> None:
    assert sum(parameter.numel() for parameter in DiT(ModelConfig(mlp_ratio=2.0)).parameters()) == 278_916
    assert sum(parameter.numel() for parameter in DiT(ModelConfig()).parameters()) == 344_964


def test_initial_model_predicts_zero_and_learns_from_its_last_layer_first() -> None:
    model = initialise(DiT(SMALL), seed=0)
    images, time, condition, drop = _inputs(SMALL)
    velocity = model(images, time, condition, drop)
    assert not velocity.any()
    velocity.square().add(velocity).sum().backward()
    moved = {
        name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert moved == {"final.weight", "final.bias"}


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = (initialise(DiT(SMALL), seed=seed).state_dict() for seed in (3, 3, 4))
    deeper = initialise(DiT(SMALL.model_copy(update={"depth": 5})), seed=3).state_dict()
    assert all(first[name].equal(again[name]) and first[name].equal(deeper[name]) for name in first)
    assert not first["patch.weight"].equal(other["patch.weight"])
    assert not first["blocks.0.mlp.up.weight"].equal(first["blocks.1.mlp.up.weight"])
    assert DiT.initial_tensor("patch.weight", shape=(32, 4), seed=3).equal(first["patch.weight"])


def test_a_dropped_condition_is_the_null_condition_whatever_was_said() -> None:
    model = _stirred(SMALL)
    images, time, condition, _ = _inputs(SMALL)
    drop = torch.tensor([True, False, True])
    one, two = model(images, time, condition, drop), model(images, time, condition + 1, drop)
    assert one[0].equal(two[0])
    assert one[2].equal(two[2])
    assert not one[1].equal(two[1])


def test_each_sample_is_computed_apart_from_the_others() -> None:
    model = _stirred(SMALL)
    images, time, condition, drop = _inputs(SMALL)
    whole = model(images, time, condition, drop)
    alone = torch.cat(
        [model(images[i : i + 1], time[i : i + 1], condition[i : i + 1], drop[i : i + 1]) for i in range(3)]
    )
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (4, 12)])
def test_patches_return_to_where_they_came_from(shape: tuple[int, int]) -> None:
    config = SMALL.model_copy(update={"channels": 3})
    model = DiT(config)
    images = torch.arange(2 * 3 * shape[0] * shape[1]).reshape(2, 3, *shape).float()
    patches = model._to_patches(images)
    assert patches.shape == (2, shape[0] * shape[1] // 4, 12)
    assert patches[0, 1].view(3, 2, 2).equal(images[0, :, 0:2, 2:4])
    assert model._to_images(patches, rows=shape[0] // 2, columns=shape[1] // 2).equal(images)


def test_images_of_any_shape_are_taken_and_their_middles_are_one_place() -> None:
    model = _stirred(SMALL)
    _, time, condition, drop = _inputs(SMALL)
    for height, width in ((4, 12), (12, 4), (6, 8), (16, 16)):
        images = torch.randn(3, 1, height, width, generator=torch.Generator().manual_seed(2))
        assert model(images, time, condition, drop).shape == images.shape
    square = model.position.unflatten(0, (4, 4))
    assert model._position(2, 4).unflatten(0, (2, 4)).equal(square[1:3])
    assert model._position(4, 2).unflatten(0, (4, 2)).equal(square[:, 1:3])
    wide = model._position(4, 6).unflatten(0, (4, 6))
    assert wide[:, 1:5].equal(square)
    assert len(wide.flatten(0, 1).unique(dim=0)) == 24, "no two places look alike"
    model.reset_buffers()
    assert model._position(4, 6).unflatten(0, (4, 6)).equal(wide)


def test_the_fixed_embedding_of_a_square_is_what_it_always_was() -> None:
    """Published models were trained with it: rows and columns numbered from 0."""
    axis = torch.arange(4, dtype=torch.float32)
    rows, columns = sinusoids(axis.repeat_interleave(4), features=16), sinusoids(axis.repeat(4), features=16)
    assert DiT(SMALL).position.equal(torch.cat([rows, columns], dim=1))


def test_recomputed_activations_give_the_same_gradients() -> None:
    images, time, condition, drop = _inputs(SMALL)
    gradients: list[list[Tensor]] = []
    for recompute in (False, True):
        model = _stirred(SMALL)
        for block in model.blocks:
            cast("Block", block).recompute = recompute
        losses = flow.loss(model, images=images, noise=images.flip(0), time=time, condition=condition, drop=drop)
        losses.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(kept.equal(recomputed) for kept, recomputed in zip(*gradients, strict=True))


def test_time_is_not_rounded_to_the_compute_dtype() -> None:
    """bfloat16 cannot tell 0.501 from 0.502; the sinusoids must."""
    model = _stirred(SMALL).to(torch.bfloat16)
    images, _, condition, drop = _inputs(SMALL)
    near = [model(images, torch.full((3,), value), condition, drop) for value in (0.501, 0.502)]
    assert not near[0].equal(near[1])
    assert near[0].dtype == torch.float32
