"""Pictures depend on the model, the seed and their index, and on nothing that shares their batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services.sample import CHUNK_IMAGES, KEPT_MODELS, SampleService, noise_of, to_pixels
from services.service import Call, Reply, ServiceContext
from services.wire.messages import SampleArgs, Weights
from spec.errors import DataError, GkrError, RefusedError
from spec.train import ModelConfig
from training.models.dit import DiT
from training.models.network import initialise
from training.models.weights import save_model

TEXT = ModelConfig(width=16, depth=1, heads=2, text_width=6)
CLASS = ModelConfig(width=16, depth=1, heads=2, conditioning="class", num_classes=10, channels=3, image_size=12)


def published(folder: Path, config: ModelConfig, *, seed: int = 0) -> Weights:
    """A model whose output layers are not zero, as after training."""
    model = initialise(DiT(config), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
    }
    path = save_model(folder / "published", state=state, config=config)
    return Weights(sha256=path.stem, urls=[path.as_uri()])


def embeddings(count: int, *, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, TEXT.text_width), dtype=np.float32)


def call(weights: Weights, *, count: int, tensors: dict[str, NDArray[Any]] | None = None, **fields: Any) -> Call:
    values: dict[str, Any] = {"weights": weights, "labels": (list(range(10)) * 9)[:count], "seed": 5, "steps": 3}
    values |= fields
    return Call(args=SampleArgs(**values), tensors={"embeddings": embeddings(count)} if tensors is None else tensors)


def changed(weights: Weights, change: dict[str, Any]) -> Call:
    return call(change.get("weights", weights), count=2, **{name: change[name] for name in change if name != "weights"})


def images(answer: Reply | GkrError) -> NDArray[np.uint8]:
    assert isinstance(answer, Reply), answer
    return answer.tensors["images"]


@pytest.fixture
def service(tmp_path: Path) -> SampleService:
    context = ServiceContext(kind="sample", name="painter", cache_dir=tmp_path / "cache", manifest="", max_batch=64)
    one = SampleService(context)
    one.warm_up()
    return one


def test_images_come_as_pixels_of_the_models_shape(service: SampleService, tmp_path: Path) -> None:
    text, classes = published(tmp_path, TEXT), published(tmp_path, CLASS)
    (grey,) = service.compute("sample", [call(text, count=5)])
    (coloured,) = service.compute("sample", [call(classes, count=4, tensors={})])
    assert images(grey).shape == (5, 8, 8, 1)
    assert images(coloured).shape == (4, 12, 12, 3)
    assert images(grey).dtype == np.uint8
    assert images(grey).flags.c_contiguous
    assert isinstance(grey, Reply)
    assert grey.body.weights_sha256 == text.sha256
    assert images(grey).std() > 10  # not one colour


def test_a_picture_does_not_depend_on_its_batch(service: SampleService, tmp_path: Path) -> None:
    weights, count = published(tmp_path, TEXT), CHUNK_IMAGES + 7
    told = embeddings(count)
    (whole,) = service.compute("sample", [call(weights, count=count, tensors={"embeddings": told})])
    singles = [
        call(weights, count=1, first=index, tensors={"embeddings": told[index : index + 1]}) for index in range(count)
    ]
    together = service.compute("sample", list(reversed(singles)))[::-1]
    for index in range(count):
        assert (images(together[index])[0] == images(whole)[index]).all(), index
    (alone,) = service.compute("sample", [singles[CHUNK_IMAGES]])
    assert (images(alone)[0] == images(whole)[CHUNK_IMAGES]).all()


def test_each_argument_changes_the_picture(service: SampleService, tmp_path: Path) -> None:
    weights = published(tmp_path, TEXT)
    base = images(service.compute("sample", [call(weights, count=2)])[0])
    assert (images(service.compute("sample", [call(weights, count=2)])[0]) == base).all()
    changes: tuple[dict[str, Any], ...] = (
        {"seed": 6},
        {"first": 1},
        {"steps": 5},
        {"guidance": 1.0},
        {"weights": published(tmp_path, TEXT, seed=1)},
    )
    for change in changes:
        other = images(service.compute("sample", [changed(weights, change)])[0])
        assert (other != base).any(), change
    shifted = images(
        service.compute("sample", [call(weights, count=2, first=1, tensors={"embeddings": embeddings(2)[[1, 0]]})])[0]
    )
    assert (shifted[0] == base[1]).all()


def test_noise_is_standard_normal_and_keyed_by_seed_and_index() -> None:
    first = noise_of(3, index=8, shape=(4, 64, 64))
    assert first.dtype == np.float32
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 1) < 0.02
    assert (noise_of(3, index=8, shape=(4, 64, 64)) == first).all()
    for seed, index in ((8, 3), (3, 9), (4, 8)):
        assert (noise_of(seed, index=index, shape=(4, 64, 64)) != first).any()


def test_pixels_are_rounded_and_clamped() -> None:
    values = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0]).reshape(1, 1, 1, 5)
    assert to_pixels(values).reshape(-1).tolist() == [0, 0, 128, 255, 255]


def test_calls_of_one_batch_agree_on_model_steps_and_guidance(tmp_path: Path) -> None:
    (method,) = SampleService.methods
    weights = published(tmp_path, TEXT)
    base = call(weights, count=2).args
    assert method.batch_key(base) == method.batch_key(call(weights, count=3, seed=9, first=4).args)
    other = published(tmp_path, TEXT, seed=1)
    changes: tuple[dict[str, Any], ...] = ({"steps": 4}, {"guidance": 1.5}, {"weights": other})
    for change in changes:
        assert method.batch_key(changed(weights, change).args) != method.batch_key(base)
    assert method.cost(base) == 2


def test_at_most_two_models_stay_in_memory_and_none_is_fetched_twice(service: SampleService, tmp_path: Path) -> None:
    models = [published(tmp_path, TEXT, seed=seed) for seed in range(3)]
    pictures = [images(service.compute("sample", [call(one, count=1)])[0]) for one in models]
    assert len(service._models) == KEPT_MODELS
    for path in (tmp_path / "published").iterdir():
        path.unlink()
    again = [images(service.compute("sample", [call(one, count=1)])[0]) for one in models]
    assert all((one == other).all() for one, other in zip(pictures, again, strict=True))


def test_a_model_that_cannot_be_had_refuses_the_whole_batch(service: SampleService, tmp_path: Path) -> None:
    weights = published(tmp_path, TEXT)
    wrong = Weights(sha256="0" * 64, urls=weights.urls)
    with pytest.raises(RefusedError, match="model 000000000000 could not be had: file:") as refused:
        service.compute("sample", [call(wrong, count=1)])
    assert refused.value.hint
    images(service.compute("sample", [call(weights, count=1)])[0])  # and the service goes on


def test_a_file_that_is_no_model_is_refused_although_its_digest_is_right(
    service: SampleService, tmp_path: Path
) -> None:
    import hashlib

    path = tmp_path / "noise"
    path.write_bytes(b"not a model")
    weights = Weights(sha256=hashlib.sha256(b"not a model").hexdigest(), urls=[path.as_uri()])
    with pytest.raises(DataError, match="not a safetensors file"):
        service.compute("sample", [call(weights, count=1)])


def test_a_call_that_does_not_fit_the_model_is_refused_alone(service: SampleService, tmp_path: Path) -> None:
    weights = published(tmp_path, TEXT)
    bad = {
        r"embeddings float32 \[2, 6\], the call carries none": call(weights, count=2, tensors={}),
        r"carries float32 \[3, 6\]": call(weights, count=2, tensors={"embeddings": embeddings(3)}),
        r"carries float64 \[2, 6\]": call(weights, count=2, tensors={"embeddings": embeddings(2).astype(np.float64)}),
        "asks for no image": call(weights, count=0),
        "must not be negative": call(weights, count=2, first=-1),
    }
    good = call(weights, count=2)
    answers = service.compute("sample", [good, *bad.values(), good])
    assert (images(answers[0]) == images(answers[-1])).all()
    for said, answer in zip(bad, answers[1:-1], strict=True):
        assert isinstance(answer, RefusedError)
        assert answer.hint
        with pytest.raises(RefusedError, match=said):
            raise answer
    assert all(isinstance(answer, RefusedError) for answer in service.compute("sample", list(bad.values())))


def test_unknown_labels_and_senseless_settings_are_refused(service: SampleService, tmp_path: Path) -> None:
    classes = published(tmp_path, CLASS)
    (answer,) = service.compute("sample", [call(classes, count=1, tensors={}, labels=[10])])
    assert isinstance(answer, RefusedError)
    assert "0 to 9" in answer.hint
    for change, said in (
        ({"steps": 0}, "steps is 0"),
        ({"steps": 10**6}, "steps is"),
        ({"guidance": float("nan")}, "guidance is nan"),
    ):
        with pytest.raises(RefusedError, match=said):
            service.compute("sample", [call(classes, count=1, tensors={}, **change)])
