"""A dataset of encoded images is a yardstick too: its images are brought to the size of those that are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.evaluate import EvaluateService
from services.evaluate.reference import load_splits
from services.service import Call, Reply, ServiceContext
from services.wire.messages import AccumulateArgs, ScoreArgs, ScoreReply, TotalArgs, TotalReply
from spec.errors import GkrError, RefusedError
from spec.shards import open_manifest, path_of, seal
from storage.images import decode_into
from tests.builders.object_store import environment_of, serve_objects
from tests.builders.pictures import encoded
from tests.builders.tar_datasets import Picture, make_tar_dataset

SIDE = 64
LABELS = 7


def drawn(number: int, *, width: int = 80, height: int = 72) -> np.ndarray:
    """Bars whose colour and direction tell the label, [height, width, 3], with noise that only this number has."""
    rng, label = np.random.default_rng(number), number % LABELS
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    wave = np.sin((across * np.cos(label) + down * np.sin(label)) / 4.0)[..., None] * (40, 40 + 10 * label, 90)
    return np.clip(128 + wave + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(np.uint8)


def dataset(folder: Path, *, damaged: tuple[int, ...] = (), train: int = 210, test: int = 70) -> str:
    pictures = [
        Picture(b"\x89PNG no image" if number in damaged else encoded(drawn(number)), 80, 72)
        for number in range(train + test)
    ]
    return make_tar_dataset(folder, train=pictures[:train], test=pictures[train:])


def judge(uri: str, *, cache: Path, shape: tuple[int, ...] = ()) -> EvaluateService:
    return EvaluateService(
        ServiceContext(kind="evaluate", name="judge", cache_dir=cache, manifest=uri, max_batch=64, shape=shape)
    )


def ask(service: EvaluateService, method: str, args: Any, images: NDArray[np.uint8] | None = None) -> Any:
    (answer,) = service.compute(method, [Call(args=args, tensors={} if images is None else {"images": images})])
    if isinstance(answer, GkrError):
        raise answer
    assert isinstance(answer, Reply)
    return answer.body


def held_out(*, count: int, first: int = 210) -> tuple[NDArray[np.uint8], list[int]]:
    """The pictures of the held-out split as a model of that size would make them if it were perfect."""
    images = np.empty((count, SIDE, SIDE, 3), dtype=np.uint8)
    for place in range(count):
        decode_into(images[place], encoded(drawn(first + place)))
    return images, [(first + place) % LABELS for place in range(count)]


def test_good_images_score_better_than_noise_and_a_total_agrees(tmp_path: Path) -> None:
    uri, folder = dataset(tmp_path / "data"), (tmp_path / "parts").as_uri()
    service = judge(uri, cache=tmp_path / "cache", shape=(SIDE, SIDE, 3))
    service.warm_up()
    images, labels = held_out(count=70)
    good: ScoreReply = ask(service, "score", ScoreArgs(manifest=uri, labels=labels), images)
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    bad: ScoreReply = ask(service, "score", ScoreArgs(manifest=uri, labels=labels), noise)
    assert good.classifier_accuracy > 0.9 > 0.5 > bad.classifier_accuracy
    assert good.frechet_distance * 5 < bad.frechet_distance
    assert good.nearest_train_distance < bad.nearest_train_distance
    for sequence, start in enumerate(range(0, 70, 35)):
        args = AccumulateArgs(
            manifest=uri, labels=labels[start : start + 35], run="r", sequence=sequence, folder=folder
        )
        ask(service, "accumulate", args, images[start : start + 35])
    with pytest.raises(RefusedError, match="encoded images") as caught:
        ask(service, "total", TotalArgs(manifest=uri, run="r", folder=folder))
    assert "`shape`" in caught.value.hint
    total: TotalReply = ask(service, "total", TotalArgs(manifest=uri, run="r", folder=folder, shape=[SIDE, SIDE, 3]))
    assert total.samples == 70
    assert total.frechet_distance == pytest.approx(0, abs=1e-3), "these are the held-out images themselves"
    assert total.classifier_accuracy == good.classifier_accuracy


def test_a_shared_replica_learns_the_size_from_the_images_and_keeps_sizes_apart(tmp_path: Path) -> None:
    uri = dataset(tmp_path / "data", train=70, test=28)
    service = judge("", cache=tmp_path / "cache")
    service.warm_up()
    images, labels = held_out(count=14, first=70)
    large: ScoreReply = ask(service, "score", ScoreArgs(manifest=uri, labels=labels), images)
    small: ScoreReply = ask(service, "score", ScoreArgs(manifest=uri, labels=labels), images[:, ::2, ::2].copy())
    again: ScoreReply = ask(service, "score", ScoreArgs(manifest=uri, labels=labels), images)
    assert large == again != small


def test_the_next_replica_decodes_nothing_again(tmp_path: Path) -> None:
    uri = dataset(tmp_path / "data", train=70, test=28)
    images, labels = held_out(count=14, first=70)
    args, cache, shape = ScoreArgs(manifest=uri, labels=labels), tmp_path / "cache", (SIDE, SIDE, 3)
    first = ask(judge(uri, cache=cache, shape=shape), "score", args, images)
    for shard in (tmp_path / "data").glob("*.tar"):
        shard.unlink()
    assert ask(judge(uri, cache=cache, shape=shape), "score", args, images) == first


def test_images_that_cannot_be_used_or_have_no_label_are_left_out(tmp_path: Path) -> None:
    uri = dataset(tmp_path / "data", train=35, test=14, damaged=(3, 4, 40))
    train, test = load_splits(uri, cache=tmp_path, shape=(SIDE, SIDE, 3))
    assert (len(train), len(test)) == (33, 13)
    assert train.labels[:5].tolist() == [0, 1, 2, 5, 6]
    assert train.pixels.shape == (33, 32, 32, 3)


def test_a_dataset_without_labels_is_refused_with_the_remedy(tmp_path: Path) -> None:
    uri = dataset(tmp_path / "data", train=14, test=7)
    path = path_of(uri)
    path.write_text(seal(open_manifest(uri).model_copy(update={"labels": []})).write_json())
    with pytest.raises(RefusedError, match="no labels") as caught:
        judge(uri, cache=tmp_path / "cache", shape=(SIDE, SIDE, 3)).warm_up()
    assert "--labels folders" in caught.value.hint


def test_of_a_dataset_in_a_bucket_only_what_is_looked_at_comes_here(tmp_path: Path) -> None:
    uri = dataset(tmp_path / "data", train=70, test=28)
    with serve_objects(tmp_path) as server, environment_of(server):
        bucket = server.open()
        for path in path_of(uri).parent.iterdir():
            bucket.send(path.name, path)
        there = load_splits(f"{bucket.uri}/manifest.json", cache=tmp_path / "cache", shape=(SIDE, SIDE, 3), most=5)
    here = load_splits(uri, cache=tmp_path, shape=(SIDE, SIDE, 3), most=5)
    for one, other in zip(there, here, strict=True):
        assert (one.pixels == other.pixels).all()
        assert (one.labels == other.labels).all()
