"""Embeddings that were computed ahead: each sample brings its own, from one encoder, or training does not begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.buckets import Bucket
from spec.errors import ConfigError, DataError
from spec.shards import path_of
from spec.train import ModelConfig
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.data.features import check_encoder
from training.data.loader import Loader, LocalBatch

SECONDS = 30.0
WIDTH = 5
MODEL = ModelConfig(image_size=16, channels=3, text_width=WIDTH)
TRAIN, TEST = 50, 5
ROWS = np.random.default_rng(0).standard_normal((TRAIN + TEST, WIDTH), dtype=np.float32)


def make(folder: Path, *, rows: np.ndarray | None = ROWS, broken: int = -1, **more: Any) -> str:
    """Fifty training pictures in three shards, five others. `broken`: a picture that is none."""
    made = [Picture(encoded(picture(number)), 32, 24) for number in range(TRAIN + TEST)]
    if broken >= 0:
        made[broken] = made[broken]._replace(data=b"no picture")
    return make_tar_dataset(folder, train=made[:TRAIN], test=made[TRAIN:], embeddings=rows, **more)


def a_loader(*uris: str, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {
        "seed": 3, "learner": "east", "start_position": 0, "batch": 10, "rank": 0, "world_size": 1, "workers": 0,
        "prefetch": 4, "model": MODEL, "cache": path_of(uris[0]).parents[1] / "cache",
    }  # fmt: skip
    return Loader(uris, **(arguments | changes))


def batches(*uris: str, count: int = 10, **changes: Any) -> list[LocalBatch]:
    with a_loader(*uris, **changes) as loader:
        assert loader.encoder == "encoder-1"
        return [loader.next(SECONDS) for _ in range(count)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workers": 2},
        {"workers": 2, "world_size": 2, "rank": 1},
        {"buckets": [Bucket(16, 16, 10), Bucket(24, 16, 7)]},
        {"is_plain": True, "batch": 50},
    ],
    ids=["here", "workers", "second rank", "sizes", "plain"],
)
def test_every_sample_brings_its_own_embedding(tmp_path: Path, changes: dict[str, Any]) -> None:
    for batch in batches(make(tmp_path / "d"), **changes):
        assert batch.embeddings.dtype == np.float32
        assert batch.embeddings.tobytes() == ROWS[batch.ids].tobytes()


def test_a_sample_that_is_replaced_brings_the_embedding_of_the_one_in_its_place(tmp_path: Path) -> None:
    with a_loader(make(tmp_path / "d", broken=7)) as loader:
        some = [loader.next(SECONDS) for _ in range(10)]
        assert len(loader.quarantined()) == 2, "once in each epoch"
    assert all(batch.embeddings.tobytes() == ROWS[batch.ids].tobytes() for batch in some)


def test_an_embedding_that_is_no_number_makes_its_sample_unusable(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[11, 2] = np.nan
    with a_loader(make(tmp_path / "d", rows=rows)) as loader:
        some = [loader.next(SECONDS) for _ in range(5)]
        (bad,) = loader.quarantined()
    assert (bad.sample, bad.reason) == (11, "embedding")
    assert all(np.isfinite(batch.embeddings).all() for batch in some)


def test_training_does_not_begin_with_holes(tmp_path: Path) -> None:
    """Report 17 (SimpleTuner#859): an entry that is missing is met before the first step, not hours later."""
    uri = make(tmp_path / "d")
    file = tmp_path / "d" / "train-0040.tar.f32"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(DataError, match="has 196 bytes, the manifest says 200: samples would be trained without"):
        a_loader(uri)
    file.unlink()
    with pytest.raises(DataError, match=r"train-0040\.tar\.f32"):
        a_loader(uri)
    file.write_bytes(b"\0" + whole[1:])
    with a_loader(uri, batch=50) as loader, pytest.raises(DataError, match="is not the one that was written"):
        loader.next(SECONDS)


def test_embeddings_of_two_encoders_are_never_mixed(tmp_path: Path) -> None:
    one, two = make(tmp_path / "a"), make(tmp_path / "b", encoder="encoder-2")
    with pytest.raises(ConfigError, match=r"of encoder encoder-2, those of .* of encoder-1") as caught:
        a_loader(one, two)
    assert "--embed captions --encoder" in caught.value.hint


def test_embeddings_of_another_width_than_the_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have 5 features, the model needs 384") as caught:
        a_loader(make(tmp_path / "d"), model=ModelConfig(image_size=16, channels=3))
    assert "set train.model.text_width to 5" in caught.value.hint


def test_a_mixture_of_which_one_dataset_has_none_asks_the_encoder_for_all(tmp_path: Path) -> None:
    with a_loader(make(tmp_path / "a"), make(tmp_path / "b", rows=None)) as loader:
        assert loader.encoder == ""
        assert loader.next(SECONDS).embeddings.shape == (10, 0)


def test_a_model_of_classes_needs_no_embeddings(tmp_path: Path) -> None:
    model = ModelConfig(image_size=16, channels=3, conditioning="class")
    with a_loader(make(tmp_path / "d"), model=model) as loader:
        assert loader.encoder == ""
        assert loader.next(SECONDS).embeddings.shape == (10, 0)


def test_another_encoder_than_the_experiments_is_refused_with_the_remedy() -> None:
    check_encoder("a" * 64, asked="a" * 64, where="file:///d/manifest.json")
    with pytest.raises(ConfigError, match=r"encoder aaaaaaaaaaaa, the experiment's .* bbbbbbbbbbbb") as caught:
        check_encoder("a" * 64, asked="b" * 64, where="file:///d/manifest.json")
    assert "gkr data prepare ... --embed captions" in caught.value.hint
