"""Embeddings for training: asked once per caption, cached by content, never of two encoders in one run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.client import LocalClient
from services.service import Call, Method, Reply, Service, ServiceContext
from services.wire.messages import EncodeArgs, EncodeReply
from spec.errors import ConfigError
from training.conditions import KEPT_BYTES, Conditions

WIDTH = 8


class StandInEncoder(Service):
    """Stands in for the sentence encoder: a digest of the caption instead of a meaning, and it counts."""

    methods = (Method("encode", EncodeArgs, EncodeReply),)
    fingerprint = "a" * 64

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.asked: list[str] = []

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply]:
        return [self._encode(call.args) for call in calls]

    def _encode(self, args: EncodeArgs) -> Reply:
        self.asked += args.captions
        rows = [np.frombuffer(hashlib.sha256(text.encode()).digest()[:WIDTH], np.uint8) for text in args.captions]
        return Reply(EncodeReply(encoder=self.fingerprint), {"embeddings": np.stack(rows).astype(np.float32)})


@pytest.fixture
def encoder() -> StandInEncoder:
    return StandInEncoder(ServiceContext(kind="encode", name="encoder", cache_dir=Path(), manifest="", max_batch=64))


def conditions(
    encoder: StandInEncoder, folder: Path, *, width: int = WIDTH, kept_bytes: int = KEPT_BYTES
) -> Conditions:
    made = Conditions(LocalClient(encoder), folder=folder, width=width, kept_bytes=kept_bytes)
    made.connect()
    encoder.asked.clear()
    return made


def test_rows_come_in_the_order_asked_for_and_each_caption_is_encoded_once(
    encoder: StandInEncoder, tmp_path: Path
) -> None:
    asks = conditions(encoder, tmp_path)
    first = asks.get(["seven", "two", "seven"])
    again = asks.get(["two", "seven"])
    assert first.shape == (3, WIDTH)
    assert np.array_equal(first[0], first[2])
    assert np.array_equal(again, first[[1, 0]])
    assert sorted(encoder.asked) == ["seven", "two"]


def test_another_process_of_the_node_finds_them_in_the_cache(encoder: StandInEncoder, tmp_path: Path) -> None:
    first = conditions(encoder, tmp_path).get(["seven", "two"])
    again = conditions(encoder, tmp_path).get(["seven", "two"])
    assert encoder.asked == []
    assert np.array_equal(first, again)


def test_a_dataset_that_never_repeats_a_caption_fills_neither_memory_nor_disk(
    encoder: StandInEncoder, tmp_path: Path
) -> None:
    asks = conditions(encoder, tmp_path, kept_bytes=10 * 4 * WIDTH)
    for batch in range(20):
        captions = [f"{batch}-{number}" for number in range(30)]
        assert asks.get(captions).shape == (30, WIDTH)
    assert len(encoder.asked) == 20 * 30
    assert len(asks._known) == 10
    assert len(list(tmp_path.glob("*/*"))) == 10
    assert conditions(encoder, tmp_path, kept_bytes=10 * 4 * WIDTH).get(["new", "0-0"]).shape == (2, WIDTH)
    assert len(list(tmp_path.glob("*/*"))) == 10


def test_what_was_used_last_stays(encoder: StandInEncoder, tmp_path: Path) -> None:
    asks = conditions(encoder, tmp_path, kept_bytes=3 * 4 * WIDTH)
    for captions in (["a", "b", "c"], ["a"], ["d", "e"], ["a"]):
        asks.get(captions)
    assert encoder.asked == ["a", "b", "c", "d", "e"]


def test_another_encoder_does_not_use_that_cache(encoder: StandInEncoder, tmp_path: Path) -> None:
    conditions(encoder, tmp_path).get(["seven"])
    encoder.fingerprint = "b" * 64
    conditions(encoder, tmp_path).get(["seven"])
    assert encoder.asked == ["seven"]


def test_an_encoder_that_changes_during_training_is_an_error(encoder: StandInEncoder, tmp_path: Path) -> None:
    asks = conditions(encoder, tmp_path)
    encoder.fingerprint = "b" * 64
    with pytest.raises(ConfigError, match="changed from aaaaaaaaaaaa to bbbbbbbbbbbb"):
        asks.get(["seven"])


def test_a_width_that_the_model_does_not_have_names_the_field(encoder: StandInEncoder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="text_width") as caught:
        conditions(encoder, tmp_path, width=100)
    assert caught.value.hint == f"set train.model.text_width to {WIDTH}"
