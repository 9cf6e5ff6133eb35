from __future__ import annotations

import pytest

from gkr.watch.text import milliseconds, percent, short_count, short_duration, shortened, sparkline


def test_a_sparkline_spans_low_to_high_and_marks_what_is_not_finite() -> None:
    assert (
        sparkline([1.0, 2.0, 3.0], width=10) == "\u2581\u2585\u2588"
        or sparkline([1.0, 2.0, 3.0], width=10)[0] == "\u2581"
    )
    assert sparkline([1.0, float("nan"), 3.0], width=10)[1] == "!"
    assert sparkline([5.0] * 4, width=10) == "\u2581" * 4
    assert sparkline([], width=10) == ""


def test_a_long_history_becomes_means_within_the_width() -> None:
    assert len(sparkline([float(value) for value in range(100)], width=32)) <= 32
    assert sparkline([float(value) for value in range(100)], width=32, ascii_only=True).isascii()


@pytest.mark.parametrize(
    ("seconds", "want"), [(0, "0s"), (59.4, "59s"), (185, "3m05s"), (7440, "2h04m"), (273_600, "3d04h"), (-1, "0s")]
)
def test_durations(seconds: float, want: str) -> None:
    assert short_duration(seconds) == want


@pytest.mark.parametrize(("count", "want"), [(950, "950"), (51_200, "51.2k"), (3_400_000, "3.4M"), (0, "0")])
def test_counts(count: float, want: str) -> None:
    assert short_count(count) == want


def test_no_percentage_of_nothing() -> None:
    assert percent(1, 0) == ""


def test_a_long_or_broken_text_is_one_line_that_says_that_it_was_cut() -> None:
    assert shortened("all of it", width=9) == "all of it"
    assert shortened("two\nlines  here", width=20) == "two lines here"
    assert shortened("a word too many", width=11) == "a word t..."


def test_without_a_request_there_is_no_latency() -> None:
    assert (milliseconds(17.84, of=3), milliseconds(0.0, of=0)) == ("17.8", "-")
