"""Numbers read well and never fail."""

from __future__ import annotations

import math

import pytest

from gkr.report import words

THIN = "\N{NARROW NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (0.0, "0 s"),
        (0.0004, "< 1 ms"),
        (0.42, "420 ms"),
        (8.26, "8.3 s"),
        (59.97, "1 min 00 s"),
        (252.0, "4 min 12 s"),
        (7500.0, "2 h 05 min"),
        (None, words.MISSING),
        (math.nan, words.MISSING),
        (math.inf, words.MISSING),
    ],
)
def test_durations(seconds: float | None, want: str) -> None:
    assert words.duration(seconds) == want


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (0.0, "0"),
        (3.386, "3.39"),
        (12.34, "12.3"),
        (12_345.6, f"12{THIN}346"),
        (0.00012, "1.20e-04"),
        (-0.25, "-0.250"),
        (None, words.MISSING),
    ],
)
def test_numbers_keep_three_digits(value: float | None, want: str) -> None:
    assert words.number(value) == want


def test_counts_sizes_and_shares() -> None:
    assert words.count(51_200) == f"51{THIN}200"
    assert words.percent(0.9861) == "98.6 %"
    assert words.size(3_800_000) == "3.8 MB"
    assert words.plural(1, "round") == "1 round"
    assert words.plural(3, "box") == "3 boxes"


def test_a_moment_is_utc_and_a_wrong_one_is_a_dash() -> None:
    assert words.moment(0.0) == "1970-01-01 00:00:00 UTC"
    assert words.moment(1e300) == words.MISSING


@pytest.mark.parametrize(("seconds", "want"), [(90.0, 15.0), (250.0, 60.0), (36_000.0, 7200.0), (1e7, 20 * 86_400.0)])
def test_clock_ticks_are_round_and_few(seconds: float, want: float) -> None:
    assert words.clock_step(seconds, most=6) == want
