"""Pictures depend on the model, the seed and their index, and on nothing that shares their batch."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services import sample as sample_module
from services.client import LocalClient
from services.sample import CHUNK_IMAGES, KEPT_MODELS, SampleService, noise_of, sample, to_pixels
from services.service import Call, Reply, ServiceContext
from services.wire.messages import SampleArgs, Weights
from spec.errors import DataError, GkrError, RefusedError, UnreachableError
from spec.sync_status import SyncStatus
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
    """S10."""
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
        {"sampler": "heun"},
        {"sampler": "midpoint"},
        {"guidance_from": 0.5},
        {"guidance_to": 0.5},
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
    """S6: no batch mixes versions."""
    (method,) = SampleService.methods
    weights = published(tmp_path, TEXT)
    base = call(weights, count=2).args
    assert method.batch_key(base) == method.batch_key(call(weights, count=3, seed=9, first=4).args)
    other = published(tmp_path, TEXT, seed=1)
    newest = Weights(urls=weights.urls, syncer="127.0.0.1:1", run="r")
    changes: tuple[dict[str, Any], ...] = (
        {"steps": 4},
        {"guidance": 1.5},
        {"weights": other},
        {"sampler": "heun"},
        {"guidance_from": 0.1},
        {"guidance_to": 0.9},
        {"weights": newest},
    )
    assert method.batch_key(call(newest, count=1).args) != method.batch_key(
        call(msgspec.structs.replace(newest, at_least=3), count=1).args
    )
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
    changes: list[tuple[dict[str, Any], str]] = [
        ({"steps": 0}, "steps is 0"),
        ({"steps": 10**6}, "steps is"),
        ({"guidance": float("nan")}, "guidance is nan"),
        ({"sampler": "dpm"}, "no sampler 'dpm'"),
        ({"guidance_from": 0.7, "guidance_to": 0.3}, r"from 0\.7 to 0\.3"),
        ({"weights": Weights(urls=[])}, "names no weights"),
    ]
    for change, said in changes:
        with pytest.raises(RefusedError, match=said):
            service.compute("sample", [call(change.pop("weights", classes), count=1, tensors={}, **change)])


class SyncerDouble:
    """Answers the status call as a syncer whose newest model is the last of `models`."""

    def __init__(self) -> None:
        self.models: list[Weights] = []
        self.final_after = 0
        double = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                double.asked.append(self.path)
                if len(double.asked) == double.final_after:
                    double.models.append(double.models[-1])
                newest = double.models[-1].sha256 if double.models else ""
                status = SyncStatus(run="r", state="SERVING", version=len(double.models) - 1, model_sha256=newest)
                body = status.write_json().encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        self.asked: list[str] = []
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def newest(self, folder: Path, **fields: Any) -> Weights:
        urls = [f"{(folder / 'published').as_uri()}/{{sha256}}.safetensors"]
        return Weights(urls=urls, syncer=f"127.0.0.1:{self.http.server_port}", run="r", **fields)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(10)


@pytest.fixture
def syncer() -> Generator[SyncerDouble]:
    one = SyncerDouble()
    yield one
    one.close()


def test_the_newest_weights_are_those_that_the_syncer_names_when_the_batch_is_computed(
    service: SampleService, tmp_path: Path, syncer: SyncerDouble
) -> None:
    syncer.models = [published(tmp_path, TEXT, seed=seed) for seed in range(2)]
    calls = [call(syncer.newest(tmp_path), count=2, seed=seed) for seed in (1, 2)]
    first, second = service.compute("sample", calls)
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    assert syncer.asked == ["/v1/r/status"]  # once for the batch: both are drawn from the same weights
    assert first.body == second.body
    assert (first.body.weights_sha256, first.body.version) == (syncer.models[1].sha256, 1)
    pinned = images(service.compute("sample", [call(syncer.models[1], count=2, seed=1)])[0])
    assert (images(first) == pinned).all()
    syncer.models.append(published(tmp_path, TEXT, seed=2))
    (third,) = service.compute("sample", calls[:1])
    assert isinstance(third, Reply)
    assert third.body.version == 2


def test_a_version_that_is_to_come_is_waited_for_by_the_asker_and_not_by_the_replica(
    service: SampleService, tmp_path: Path, syncer: SyncerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: a reply's version is one that its request asked for."""
    monkeypatch.setattr(sample_module, "_AGAIN_SECONDS", 0.01)
    syncer.models = [published(tmp_path, TEXT)]
    args = call(syncer.newest(tmp_path, at_least=1), count=2).args
    (early,) = service.compute("sample", [Call(args=args, tensors={"embeddings": embeddings(2)})])
    assert isinstance(early, Reply)
    assert (early.body.ready, early.body.version, early.tensors) == (False, 0, {})
    syncer.final_after = 4
    told = {"embeddings": embeddings(2)}
    reply = sample(LocalClient(service), args, tensors=told, deadline_seconds=30)
    assert reply.body.version == 1
    assert len(syncer.asked) == 4
    never = call(syncer.newest(tmp_path, version=9), count=2).args
    with pytest.raises(RefusedError, match=r"version 9 of run r is not published after 0\.1 s; the newest is 1"):
        sample(LocalClient(service), never, tensors=told, deadline_seconds=0.1)


def test_a_version_that_was_superseded_and_a_syncer_that_is_away_are_refused(
    service: SampleService, tmp_path: Path, syncer: SyncerDouble
) -> None:
    syncer.models = [published(tmp_path, TEXT, seed=seed) for seed in range(3)]
    with pytest.raises(RefusedError, match="version 1 of run r was superseded by 2") as refused:
        service.compute("sample", [call(syncer.newest(tmp_path, version=1), count=1)])
    assert "sha256" in refused.value.hint
    exact = service.compute("sample", [call(syncer.newest(tmp_path, version=2), count=2)])
    images(exact[0])
    with pytest.raises(UnreachableError, match="does not answer"):
        service.compute("sample", [call(Weights(urls=[], syncer="127.0.0.1:1", run="r"), count=1)])
