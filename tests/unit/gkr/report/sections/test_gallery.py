"""Pictures are found by caption, few enough for the page, and never missing for a reason that is not told."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gkr.report.record import RunRecord
from gkr.report.sections.gallery import gallery
from spec.events import Samples


def save(folder: Path, *, number: int, captions: list[str], side: int = 8, channels: int = 1) -> Samples:
    noise = np.random.default_rng(number)
    for name in (f"{number}.npy", f"{number}-real.npy"):
        np.save(folder / name, noise.integers(0, 256, (len(captions), side, side, channels), dtype=np.uint8))
    return Samples(
        time=number,
        source="driver",
        round=number,
        model_sha256="a",
        path=f"{number}.npy",
        captions=captions,
        real_path=f"{number}-real.npy",
    )


def test_the_strip_has_a_row_per_number_word_in_the_order_of_numbers(tmp_path: Path) -> None:
    captions = ["a bold three", "a thin one", "a thin three", "a slanted two"]
    page = gallery(RunRecord(folder=tmp_path, events=(save(tmp_path, number=1, captions=captions),)))
    strip = page[page.index('class="strip"') : page.index('class="viewer"')]
    places = [strip.index(one) for one in ("a thin one", "a slanted two", "a bold three")]
    assert places == sorted(places)
    assert "a thin three" not in strip


def test_a_caption_keeps_its_row_when_its_place_changes(tmp_path: Path) -> None:
    events = (save(tmp_path, number=1, captions=["b", "a"]), save(tmp_path, number=2, captions=["a", "c"]))
    page = gallery(RunRecord(folder=tmp_path, events=events))
    strip = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = strip.split("</tr>")
    assert rows[0].count("<img") == 3
    assert rows[1].count("<img") == 2


def test_many_rounds_of_large_pictures_stay_within_the_budget(tmp_path: Path) -> None:
    events = tuple(
        save(tmp_path, number=i, captions=[str(k) for k in range(64)], side=128, channels=3) for i in range(1, 30)
    )
    page = gallery(RunRecord(folder=tmp_path, events=events))
    assert len(page) < 1_000_000
    assert page.count('name="frame"') == 12
    assert 'for="frame-11">29<' in page


def test_frames_are_chosen_without_a_script(tmp_path: Path) -> None:
    events = tuple(save(tmp_path, number=i, captions=["a"]) for i in (1, 2))
    page = gallery(RunRecord(folder=tmp_path, events=events))
    assert "#frame-1:checked~.frames>:nth-child(2){display:grid}" in page
    assert '<input type="radio" name="frame" id="frame-1" checked>' in page


def test_missing_pictures_are_told(tmp_path: Path) -> None:
    event = save(tmp_path, number=1, captions=["a"])
    (tmp_path / "1-real.npy").unlink()
    gone = event.model_copy(update={"round": 2, "path": "gone.npy"})
    record = RunRecord(folder=tmp_path, events=(event, gone))
    assert "No pictures" not in gallery(record)
    assert record.problems == [
        "real pictures of round 1: 1-real.npy is missing",
        "pictures of round 2: gone.npy is missing",
    ]
