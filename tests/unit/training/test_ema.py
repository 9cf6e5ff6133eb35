"""The averaged weights follow the recurrence, in place and in the order of the flat ranges."""

from __future__ import annotations

import torch

from spec.train import ModelConfig
from training.ema import Ema
from training.models.dit import DiT
from training.models.network import initialise
from training.parallel import assign_local, gather_local


def test_average_follows_the_weights_with_its_decay() -> None:
    model = initialise(DiT(ModelConfig(width=16, depth=1, heads=2, text_width=8)), seed=1)
    ema = Ema(model, decay=0.75)
    start = gather_local(model)
    assert ema.vector.equal(start)
    assign_local(model, start + 4.0)
    ema.update()
    torch.testing.assert_close(ema.vector, start + 1.0)
    ema.update()
    torch.testing.assert_close(ema.vector, start + 1.75)
    assert gather_local(model).equal(start + 4.0), "the weights themselves do not move"


def test_an_assigned_average_is_what_goes_on() -> None:
    model = initialise(DiT(ModelConfig(width=16, depth=1, heads=2, text_width=8)), seed=1)
    ema = Ema(model, decay=0.5)
    ema.assign(torch.zeros_like(ema.vector))
    ema.update()
    torch.testing.assert_close(ema.vector, gather_local(model) / 2)
