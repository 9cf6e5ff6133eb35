"""The families of models: which network a configuration stands for."""

from __future__ import annotations

from spec.train import AnyModelConfig, ModelConfig
from training.models.dit import DiT
from training.models.lm import LanguageModel


def make_network(config: AnyModelConfig) -> DiT | LanguageModel:
    """The network of a configuration, with torch's default weights, on the current default device."""
    return DiT(config) if isinstance(config, ModelConfig) else LanguageModel(config)
