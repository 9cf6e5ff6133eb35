"""Drawings that live in any page: own ids, the page's colours, the same bytes each time."""

from __future__ import annotations

import math
import re

import pytest

from gkr.report.charts import Chart, Line, bar_chart, line_chart, thin


def chart(key: str, *lines: Line, log: bool = False) -> Chart:
    return Chart(key, "Loss", "inner step", lines, log=log)


def test_colours_come_from_the_page_and_no_marker_colour_is_left() -> None:
    drawn = line_chart(chart("a", Line("east", [0, 1], [1, 2], 0), Line("merged", [0, 1], [2, 1], "merged", "points")))
    assert "var(--l0)" in drawn
    assert "var(--merged)" in drawn
    assert "currentColor" in drawn
    assert not re.search(r"#[0-9a-f]{6}\b", drawn.split("<defs>")[0] + drawn.split("</defs>", 1)[1])


def test_ids_of_two_charts_never_meet_and_references_follow() -> None:
    pages = [line_chart(chart(key, Line("east", [0, 1, 2], [1, 2, 3], 0, "points"))) for key in ("one", "two")]
    ids = [set(re.findall(r'\bid="([^"]+)"', page)) for page in pages]
    assert ids[0]
    assert not ids[0] & ids[1]
    for page, known in zip(pages, ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= known


def test_the_same_chart_is_the_same_bytes() -> None:
    one = chart("a", Line("east", [0, 1, 2], [1, 2, 3], 0), log=True)
    assert line_chart(one) == line_chart(one)


def test_names_stay_out_of_the_drawing_and_are_escaped_around_it() -> None:
    drawn = line_chart(chart("a", Line("<b>$\\frac{$", [0, 1], [1, 2], 0), Line("x", [0], [1], 1)))
    assert "<b>$" not in drawn
    assert "&lt;b&gt;$\\frac{$" in drawn


@pytest.mark.parametrize("log", [False, True])
def test_degenerate_series_draw_something_or_nothing_but_never_fail(log: bool) -> None:
    assert line_chart(chart("a", Line("x", [], [], 0), log=log)) == ""
    assert line_chart(chart("a", Line("x", [1, 2], [math.nan, math.inf], 0), log=log)) == ""
    for y in ([0.0], [0.0, 0.0], [-1.0, 1.0], [1e-9, 1e9], [math.nan, 5.0, math.nan], [7.0, 7.0]):
        assert "<svg" in line_chart(chart("a", Line("x", list(range(len(y))), y, 0), log=log))


def test_bars_leave_out_learners_that_did_not_take_part() -> None:
    assert "<svg" in bar_chart(
        chart("a", Line("east", [1, 2], [math.nan, 2.0], 0), Line("central", [1, 2], [1.0, 0.0], 1))
    )
    assert bar_chart(chart("a")) == ""


def test_a_screen_reader_hears_where_each_line_ends() -> None:
    assert "Loss over inner step: east ends at 2" in line_chart(chart("a", Line("east", [0, 1], [1, 2], 0)))


def test_long_series_are_thinned_to_means_that_keep_gaps() -> None:
    x = [float(i) for i in range(1000)]
    y = [1.0] * 500 + [math.nan] + [3.0] * 499
    xs, ys = thin(x, y, most=100)
    assert len(xs) <= 110
    assert ys[0] == 1.0
    assert ys[-1] == 3.0
    assert any(math.isnan(value) for value in ys)
