"""The language model: what it may see, how it begins, and that it learns a text with real optimizer steps."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from torch import Tensor

from spec.train import LanguageModelConfig
from training.models import lm
from training.models.lm import LanguageModel
from training.models.network import RecomputedBlock, initialise

SMALL = LanguageModelConfig(kind="lm", context=16, width=32, depth=2, heads=2)


def stirred(config: LanguageModelConfig = SMALL) -> LanguageModel:
    """A model none of whose weights is zero, so that every path shows."""
    model = initialise(LanguageModel(config), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def some_text(batch: int = 3, *, length: int = SMALL.context + 1) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("length", [1, 5, 16])
def test_there_are_logits_for_every_byte_in_float32(length: int) -> None:
    assert stirred()(some_text(length=length)).shape == (3, length, 256)
    assert stirred().to(torch.bfloat16)(some_text(length=length)).dtype == torch.float32


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_a_byte_changes_nothing_before_it_and_everything_from_it_on(changed: int) -> None:
    model, text = stirred(), some_text(length=16)
    other = text.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    differs = (model(text) != model(other)).any(dim=2).any(dim=0)
    assert differs.tolist() == [place >= changed for place in range(16)]


def test_the_place_of_a_byte_matters() -> None:
    logits = stirred()(torch.full((1, 16), 65))
    assert not logits[0, 0].allclose(logits[0, 1])


def test_at_first_all_bytes_are_equally_likely() -> None:
    losses = lm.loss(initialise(LanguageModel(SMALL), seed=0), text=some_text())
    torch.testing.assert_close(losses, torch.full((3,), math.log(256)))


def test_the_loss_is_the_mean_over_predicted_bytes_of_each_sample() -> None:
    text = some_text()

    def sure(tokens: Tensor) -> Tensor:
        """Certain of the right byte everywhere but at the last place of sample 1, where it is certain of another."""
        logits = torch.nn.functional.one_hot(text[:, 1:], 256).float() * 100
        logits[1, -1] = logits[1, -1].roll(1)
        assert tokens.equal(text[:, :-1])
        return logits

    torch.testing.assert_close(lm.loss(sure, text=text), torch.tensor([0.0, 100 / 16, 0.0]))


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = (initialise(LanguageModel(SMALL), seed=seed).state_dict() for seed in (3, 3, 4))
    deeper = initialise(LanguageModel(SMALL.model_copy(update={"depth": 5})), seed=3).state_dict()
    assert all(first[name].equal(again[name]) and first[name].equal(deeper[name]) for name in first)
    assert not first["embedding.weight"].equal(other["embedding.weight"])


def test_recomputed_activations_give_the_same_gradients() -> None:
    gradients: list[list[Tensor]] = []
    for recompute in (False, True):
        model = stirred()
        for block in model.blocks:
            cast("RecomputedBlock", block).recompute = recompute
        lm.loss(model, text=some_text()).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(list(stirred().parameters()))
    assert all(kept.equal(recomputed) for kept, recomputed in zip(*gradients, strict=True))
