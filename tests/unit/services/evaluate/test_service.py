"""The evaluation service scores real digits as real, noise as noise, and refuses what it cannot score.

Nothing is replaced by a stand-in.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from services.evaluate.classifier import accuracy, read_out, train_classifier
from services.evaluate.reference import Images
from services.evaluate.yardstick import make_yardstick
from services.service import Call, Reply
from services.wire.messages import ScoreArgs
from spec.errors import DataError, RefusedError
from tests.builders.evaluation import Bench


def shaken(real: Images, *, deviation: float) -> NDArray[np.uint8]:
    """The images with noise, so that none equals a real one."""
    noise = np.random.default_rng(0).normal(0, deviation, real.pixels.shape)
    return np.clip(np.rint(real.pixels + noise), 0, 255).astype(np.uint8)


def test_the_classifier_knows_held_out_digits(bench: Bench) -> None:
    score = bench.score(bench.test.pixels, bench.test.labels)
    assert score.classifier_accuracy_real >= 0.975
    assert score.classifier_accuracy == score.classifier_accuracy_real
    assert score.samples == len(bench.test)


def test_both_distances_use_the_same_number_of_images_at_most_half_of_the_held_out(bench: Bench) -> None:
    many = bench.score(bench.test.pixels, bench.test.labels)
    assert 0.45 * len(bench.test) < many.frechet_samples <= len(bench.test) // 2
    few = bench.score(bench.test.pixels[:40], bench.test.labels[:40])
    assert few.frechet_samples == 40
    assert few.frechet_distance_real > many.frechet_distance_real  # fewer samples, more bias


def test_slightly_noisy_digits_score_near_real_ones_and_pure_noise_far_off(bench: Bench) -> None:
    near = bench.score(shaken(bench.test, deviation=10), bench.test.labels)
    assert near.classifier_accuracy >= 0.95
    assert near.frechet_distance <= 2 * near.frechet_distance_real
    noise = np.random.default_rng(1).integers(0, 256, bench.test.pixels.shape, dtype=np.uint8)
    far = bench.score(noise, bench.test.labels)
    assert far.classifier_accuracy < 0.3
    assert far.frechet_distance > 10 * far.frechet_distance_real


def test_one_digit_drawn_over_and_over_is_far_off_although_each_is_recognised(bench: Bench) -> None:
    ones = bench.test.take(np.flatnonzero(bench.test.labels == 1)[np.zeros(100, dtype=np.int64)])
    score = bench.score(ones.pixels, ones.labels)
    assert score.classifier_accuracy == 1.0
    assert score.frechet_distance > 5 * score.frechet_distance_real


def test_copies_of_training_images_show_as_copies(bench: Bench) -> None:
    copied = bench.score(bench.train.pixels[:100], bench.train.labels[:100])
    assert copied.nearest_train_distance == 0
    assert copied.nearest_train_distance_real > 0.5
    held_out = bench.score(bench.test.pixels, bench.test.labels)
    assert held_out.nearest_train_distance == held_out.nearest_train_distance_real


def test_the_order_of_images_does_not_matter(bench: Bench) -> None:
    images, labels = shaken(bench.test, deviation=10), bench.test.labels
    order = np.random.default_rng(2).permutation(len(labels))
    here, there = bench.score(images, labels), bench.score(images[order], labels[order])
    assert there == here


def test_a_second_replica_takes_the_classifier_from_the_cache(bench: Bench) -> None:
    before = bench.weights.stat().st_mtime_ns
    bench.fresh().warm_up()
    assert bench.weights.stat().st_mtime_ns == before
    assert [path.name for path in bench.cache.iterdir()] == [bench.weights.name]


def test_training_again_gives_the_same_weights(bench: Bench) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    model = train_classifier(bench.train.pixels, labels=bench.train.labels, num_labels=10)
    for name, tensor in load_file(bench.weights).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    features, predicted = read_out(model, bench.train.pixels)
    assert accuracy(predicted, bench.train.labels) >= 0.98
    assert abs(features).max() <= 1


def test_a_damaged_cache_is_made_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.evaluate.classifier._EPOCHS", 1)  # the file is what is tested, not the accuracy
    (tmp_path / bench.weights.name).write_bytes(bench.weights.read_bytes()[:1000])
    make_yardstick(bench.uri, cache_dir=tmp_path)
    assert "making it again" in caplog.text
    assert load_file(tmp_path / bench.weights.name).keys() == load_file(bench.weights).keys()


def test_what_cannot_be_scored_is_refused_alone(bench: Bench) -> None:
    good = bench.call(bench.test.pixels[:20], bench.test.labels[:20])
    labels = bench.test.labels[:20]
    bad = {
        "20 images and 3 labels": bench.call(bench.test.pixels[:20], labels[:3]),
        "uint8 \\[20, 8, 4, 1\\]": bench.call(bench.test.pixels[:20, :, :4], labels),
        "float32": bench.call(bench.test.pixels[:20].astype(np.float32), labels),  # type: ignore[arg-type]
        "1 images cannot be scored": bench.call(bench.test.pixels[:1], labels[:1]),
        "label 17 is not in": bench.call(bench.test.pixels[:20], labels + 17 - labels),
        "no tensor `images`": Call(args=good.args),
    }
    answers = bench.service.compute("score", [good, *bad.values(), good])
    assert isinstance(answers[0], Reply)
    assert isinstance(answers[-1], Reply)
    for said, answer in zip(bad, answers[1:-1], strict=True):
        assert isinstance(answer, RefusedError)
        assert answer.hint
        with pytest.raises(RefusedError, match=said):
            raise answer


def test_a_missing_dataset_is_an_error_with_its_place(bench: Bench, tmp_path: Path) -> None:
    args = ScoreArgs(manifest=(tmp_path / "none.json").as_uri(), labels=[1, 2])
    (answer,) = bench.service.compute("score", [Call(args=args, tensors={"images": bench.test.pixels[:2]})])
    assert isinstance(answer, DataError)
    assert str(tmp_path) in answer.where
    assert "prepare" in answer.hint
