"""Two real steps on real digits: finite, repeatable, in both dtypes and both kinds of conditioning."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from services.prepare.__main__ import prepare
from spec.errors import ConfigError, DataError
from spec.train import LanguageModelConfig, ModelConfig, TrainConfig
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.preflight.measurements import TwoSteps
from training.preflight.two_steps import two_steps
from training.preflight.verdicts import judge_two_steps

SMALL = ModelConfig(width=32, depth=2)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    one = (tmp_path_factory.mktemp("two-steps") / "manifest.json").as_uri()
    prepare(one, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    return one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("conditioning", ["text", "class"])
def test_the_second_loss_is_finite_and_lower(uri: str, dtype: str, conditioning: str) -> None:
    model = SMALL.model_copy(update={"conditioning": conditioning})
    train = TrainConfig(model=model).model_copy(update={"dtype": dtype})
    first, second = two_steps(train, manifest_uri=uri)
    assert 0.5 < first < 10
    assert second < first
    assert two_steps(train, manifest_uri=uri) == (first, second)


def test_a_language_model_takes_its_two_steps_on_text(tmp_path: Path) -> None:
    text = (tmp_path / "manifest.json").as_uri()
    prepare(text, source="python-docstrings", shard_samples=4096, lock_timeout_seconds=30)
    train = TrainConfig(model=LanguageModelConfig(kind="lm", width=32, depth=2), dtype="float32")
    first, second = two_steps(train, manifest_uri=text)
    assert first == pytest.approx(math.log(256), abs=1e-4)
    assert second < first


def test_encoded_images_are_brought_to_the_models_size(tmp_path: Path) -> None:
    some = [Picture(encoded(picture(number)), 32, 24) for number in range(5)]
    some[0] = some[0]._replace(data=some[0].data[:100])
    pictures = make_tar_dataset(tmp_path / "pictures", train=some)
    model = SMALL.model_copy(update={"image_size": 16, "channels": 3, "conditioning": "class"})
    first, second = two_steps(TrainConfig(model=model, dtype="float32"), manifest_uri=pictures)
    assert second < first < 10


def test_a_learning_rate_that_explodes_is_seen(uri: str) -> None:
    losses = two_steps(TrainConfig(model=SMALL, learning_rate=1e30, dtype="float32"), manifest_uri=uri)
    assert not math.isfinite(losses[1])
    assert judge_two_steps(TwoSteps(losses=losses)).verdict == "FAIL"


def test_a_model_of_another_shape_and_too_few_classes_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="8 x 8 x 1 in the dataset, 8 x 8 x 3 in the model") as refused:
        two_steps(TrainConfig(model=ModelConfig(channels=3)), manifest_uri=uri)
    assert "channels: 1" in refused.value.hint
    with pytest.raises(ConfigError, match="knows 2"):
        two_steps(TrainConfig(model=ModelConfig(conditioning="class", num_classes=2)), manifest_uri=uri)


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        two_steps(TrainConfig(), manifest_uri=(tmp_path / "none.json").as_uri())
