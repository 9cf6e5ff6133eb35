"""Published weights: named by digest, read back whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from spec.errors import DataError, NotFoundError
from spec.train import LanguageModelConfig, ModelConfig
from training.models.dit import DiT
from training.models.lm import LanguageModel
from training.models.network import initialise
from training.models.weights import load_model, save_model

CONFIG = ModelConfig(width=16, depth=1, heads=2, text_width=8)


def _saved(folder: Path) -> Path:
    return save_model(
        folder, state=initialise(DiT(CONFIG), seed=5).state_dict(), config=CONFIG, metadata={"version": "3"}
    )


def test_a_model_returns_with_its_configuration_and_metadata(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()
    model, metadata = load_model(path)
    wanted = initialise(DiT(CONFIG), seed=5)
    assert metadata["version"] == "3"
    assert isinstance(model, DiT)
    assert model.config == CONFIG
    assert model.position.equal(wanted.position)
    assert all(value.equal(wanted.state_dict()[name]) for name, value in model.state_dict().items())
    assert list(tmp_path.iterdir()) == [path], "nothing but the finished file"


def test_a_language_model_returns_too(tmp_path: Path) -> None:
    config = LanguageModelConfig(kind="lm", context=8, width=16, depth=1, heads=2)
    state = initialise(LanguageModel(config), seed=5).state_dict()
    model, _ = load_model(save_model(tmp_path, state=state, config=config))
    assert isinstance(model, LanguageModel)
    assert model.config == config
    text = torch.arange(8)[None]
    assert model(text).equal(initialise(LanguageModel(config), seed=5)(text))


def test_weights_written_without_torch_load_as_well(tmp_path: Path) -> None:
    arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in DiT(CONFIG).state_dict().items()}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors.numpy.save(arrays, metadata={"config": CONFIG.model_dump_json(), "added-later": "x"}))
    model, metadata = load_model(path)
    assert metadata["added-later"] == "x"
    assert model(
        torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.zeros(1, 8), torch.zeros(1, dtype=torch.bool)
    ).shape == (1, 1, 8, 8)


def test_one_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    with pytest.raises(DataError, match="not the one it is named by"):
        load_model(path)


def test_a_file_that_is_not_a_model_is_refused_with_its_place(tmp_path: Path) -> None:
    for name, data in {"text": b"hello", "other": safetensors.numpy.save({"x": np.zeros(1, np.float32)})}.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(DataError) as caught:
            load_model(path)
        assert str(path) in str(caught.value)


def test_weights_of_another_shape_than_their_configuration_are_refused(tmp_path: Path) -> None:
    other = CONFIG.model_copy(update={"width": 32})
    path = save_model(tmp_path, state=DiT(CONFIG).state_dict(), config=other)
    with pytest.raises(DataError, match=r"the configuration needs \(16,\)"):
        load_model(path)


def test_a_missing_file_is_not_damage(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        load_model(tmp_path / "gone.safetensors")
