"""The documented formula against torch's own counter of what really runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spec.train import LanguageModelConfig, ModelConfig
from training.flops import forward_flops, mfu, peak_flops, training_flops
from training.models.dit import DiT
from training.models.lm import LanguageModel
from training.models.network import initialise


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(),
        ModelConfig(image_size=16, patch_size=4, channels=3, width=48, depth=3, heads=4, mlp_ratio=2.5, text_width=20),
        ModelConfig(conditioning="class"),
    ],
)
@pytest.mark.parametrize("size", [None, (8, 24)])
def test_forward_flops_are_what_the_model_really_does(config: ModelConfig, size: tuple[int, int] | None) -> None:
    model = initialise(DiT(config), seed=0)
    images = torch.zeros(1, config.channels, *(size or (config.image_size, config.image_size)))
    condition = (
        torch.zeros(1, config.text_width) if config.conditioning == "text" else torch.zeros(1, dtype=torch.int64)
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, torch.zeros(1), condition, torch.zeros(1, dtype=torch.bool))
    assert forward_flops(config, size=size) == counter.get_total_flops()
    assert training_flops(config, size=size) == 3 * forward_flops(config, size=size)


def test_a_language_models_flops_are_what_it_really_does() -> None:
    config = LanguageModelConfig(kind="lm", context=24, width=48, depth=3, heads=4, mlp_ratio=2.5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        initialise(LanguageModel(config), seed=0)(torch.zeros(1, 24, dtype=torch.int64))
    assert forward_flops(config) == counter.get_total_flops()


def test_mfu_is_the_share_of_all_devices_and_unknown_on_a_cpu() -> None:
    peak = 989e12
    assert peak_flops("NVIDIA H200") == peak
    assert mfu(2 * peak, devices=4, peak=peak) == pytest.approx(0.5)
    assert peak_flops("AMD EPYC 9654") is None
    assert mfu(100.0, devices=2, peak=None) is None
