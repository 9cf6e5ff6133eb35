"""Weight, slant and size are what a person would say of strokes that were rendered for the purpose."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from services.prepare.caption import SIZES, SLANTS, TEMPLATES, WEIGHTS, Scale, describe, scale_of
from services.prepare.measure import Stroke, measure


def a_line(*, width: float, lean: float = 0.0, length: float = 12.0, side: int = 24) -> NDArray[np.float64]:
    """An anti-aliased line through the middle: `lean` columns to the right per row upwards."""
    fine = 8
    rows, columns = (np.indices((side * fine, side * fine)) + 0.5) / fine - side / 2
    inside = (np.abs(rows) < length / 2) & (np.abs(columns + lean * rows) < width / 2)
    return inside.reshape(side, fine, side, fine).mean(axis=(1, 3))


@pytest.mark.parametrize("width", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("lean", [-0.5, 0.0, 0.5])
def test_weight_is_the_width_of_the_line_however_it_leans(width: float, lean: float) -> None:
    weight = measure(a_line(width=width, lean=lean, length=20)).weight
    across = width / np.hypot(1, lean)  # a lean moves the line's sides closer together
    assert weight == pytest.approx(across, rel=0.3)
    assert weight < measure(a_line(width=width + 0.5, lean=lean, length=20)).weight


@pytest.mark.parametrize("lean", [-0.6, -0.25, 0.0, 0.25, 0.6])
@pytest.mark.parametrize("width", [1.0, 2.5])
def test_slant_is_the_lean_of_the_line_however_thick_it_is(lean: float, width: float) -> None:
    assert measure(a_line(width=width, lean=lean)).slant == pytest.approx(lean, abs=0.02)


def test_size_grows_with_the_box_around_the_ink() -> None:
    sizes = [measure(a_line(width=2, length=length)).size for length in (4, 8, 12)]
    assert sizes == pytest.approx([8, 16, 24], rel=0.01)


def test_moving_the_ink_changes_nothing() -> None:
    ink = a_line(width=2, lean=0.3, length=8)
    moved = measure(np.roll(ink, (3, -2), axis=(0, 1)))
    still = measure(ink)
    assert [moved.weight, moved.slant, moved.size] == pytest.approx([still.weight, still.slant, still.size])


def test_an_empty_image_has_no_stroke() -> None:
    assert measure(np.zeros((8, 8))) == Stroke(0.0, 0.0, 0.0)


def test_rendered_strokes_get_the_words_a_person_would_choose() -> None:
    strokes = [
        measure(a_line(width=width, lean=lean, length=length))
        for width in (1.0, 2.0, 3.0)
        for lean in (-0.4, 0.0, 0.4)
        for length in (8, 12, 16)
    ]
    scale = scale_of(strokes)

    def words(*, width: float, lean: float, length: float) -> str:
        return describe(measure(a_line(width=width, lean=lean, length=length)), label=1, sample=0, scale=scale)

    assert all(word in words(width=3.0, lean=0.4, length=16) for word in ("bold", "leaning right", "large", "one"))
    assert all(word in words(width=1.0, lean=-0.4, length=8) for word in ("thin", "leaning left", "small"))
    assert "upright" in words(width=2.0, lean=0.0, length=12)


def test_the_terciles_use_every_word_equally_often() -> None:
    strokes = [Stroke(weight=i, slant=-i, size=i * i) for i in range(300)]
    scale = scale_of(strokes)
    captions = [describe(stroke, label=3, sample=0, scale=scale) for stroke in strokes]
    for words in (WEIGHTS, SLANTS, SIZES):
        assert [sum(word in caption for caption in captions) for word in words] == [100, 100, 100]


def test_the_template_depends_on_the_sample_alone_and_all_are_used() -> None:
    scale, stroke = Scale((0, 1), (0, 1), (0, 1)), Stroke(0.5, 0.5, 0.5)
    captions = [describe(stroke, label=7, sample=number, scale=scale) for number in range(100)]
    assert captions == [describe(stroke, label=7, sample=number, scale=scale) for number in range(100)]
    assert len(set(captions)) == len(TEMPLATES)
    assert all("seven" in caption for caption in captions)
