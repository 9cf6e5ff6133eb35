"""One sample by itself: what is kept of it, and why it is dropped."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from services.prepare import examine as module
from services.prepare.examine import Dropped, Kept, examine, look_of
from spec.preparation import PrepareRules
from spec.shard_bytes import MAX_CAPTION_BYTES
from storage.sources import Damage, Raw
from tests.builders.pictures import encoded, picture


def judged(text: dict[str, Any], **rules: Any) -> Kept | Dropped:
    raw = Raw(key="cats/one", image=encoded(picture(1)), text=text, where="here")
    return examine(raw, rules=PrepareRules.model_validate(rules))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"caption": 7}, "bad-text"),
        ({"caption": "half a character \ud800"}, "bad-text"),
        ({"scores": [1.0, float("nan")]}, "bad-text"),
        ({"caption": "é" * (MAX_CAPTION_BYTES // 2 + 1)}, "long-caption"),
        ({"story": "x" * 2**20}, "bad-text"),
    ],
)
def test_a_text_that_cannot_be_written_drops_its_image(text: dict[str, Any], reason: str) -> None:
    found = judged(text)
    assert isinstance(found, Dropped)
    assert (found.where, found.reason) == ("here", reason)


def test_a_text_that_can_is_kept_whole() -> None:
    found = judged({"caption": "é" * (MAX_CAPTION_BYTES // 2), "score": float("nan"), "deep": {"a": [1]}})
    assert isinstance(found, Kept)
    assert sorted(found.text) == ["caption", "deep", "key"], "a number that is none says nothing"
    assert (found.width, found.height, found.ending) == (32, 24, "png")


def test_damage_of_the_source_is_dropped_with_its_own_word() -> None:
    assert examine(Damage("there", "oversize", "3 bytes"), rules=PrepareRules()) == Dropped(
        "there", "oversize", "3 bytes"
    )


def test_labels_come_from_the_folder_if_asked_for() -> None:
    found = judged({"label": 3}, labels="folders")
    assert isinstance(found, Kept)
    assert found.text["label"] == "cats"


def test_the_look_of_an_image_is_that_of_the_same_image_smaller_and_not_of_another() -> None:
    looks = [look_of(picture(number, width=300, height=200)) for number in range(20)]
    small = [look_of(np.ascontiguousarray(picture(number, width=150, height=100))) for number in range(20)]
    assert max((a ^ b).bit_count() for a, b in zip(looks, small, strict=True)) <= 3
    assert min((looks[a] ^ looks[b]).bit_count() for a in range(20) for b in range(a)) > 7
    assert look_of(np.full((9, 9, 3), 200, np.uint8)) == 0


def test_large_images_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = 0, 0
    lock = threading.Lock()
    real = module.decode_into

    def watched(out: np.ndarray, data: bytes) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        real(out, data)
        with lock:
            at_once -= 1

    monkeypatch.setattr(module, "decode_into", watched)
    monkeypatch.setattr(module, "LARGE_PIXELS", 10)
    threads = [threading.Thread(target=judged, args=({},)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert most == 1
