"""Quantities keep their exact meaning; what prints reads back."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.units import (
    format_bit_rate,
    format_bytes,
    format_duration,
    format_percent,
    parse_bit_rate,
    parse_bytes,
    parse_cpu,
    parse_duration,
    parse_percent,
)


@pytest.mark.parametrize(
    ("text", "want"), [("90s", 90), ("1h30m", 5400), ("250ms", 0.25), ("1.5h", 5400), ("1d", 86400), ("0s", 0)]
)
def test_durations_read_as_written(text: str, want: float) -> None:
    assert parse_duration(text) == want


@pytest.mark.parametrize(("text", "want"), [("64Gi", 64 * 2**30), ("64G", 64 * 10**9), ("0.5Ti", 2**39), ("1k", 1000)])
def test_sizes_read_as_written(text: str, want: int) -> None:
    assert parse_bytes(text) == want


@pytest.mark.parametrize(("text", "want"), [(2, 2.0), ("500m", 0.5), (0.25, 0.25), ("4", 4.0)])
def test_cores_read_as_written(text: object, want: float) -> None:
    assert parse_cpu(text) == want


@pytest.mark.parametrize(("text", "want"), [("100Mbit", 10**8), ("1.5kbit", 1500), ("2.5Gbit/s", 25 * 10**8)])
def test_rates_of_links_are_bits_per_second(text: str, want: int) -> None:
    assert parse_bit_rate(text) == want


@pytest.mark.parametrize("text", [100, "100", "100M", "100MB", "100mbit", "0Mbit", "0.0001kbit", "", True, None])
def test_a_rate_that_could_mean_bytes_or_nothing_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"bits per second"):
        parse_bit_rate(text)


@pytest.mark.parametrize(("text", "want"), [("0.1%", 0.001), ("100 %", 1.0), ("0%", 0.0)])
def test_shares_read_as_written(text: str, want: float) -> None:
    assert parse_percent(text) == want


@pytest.mark.parametrize("text", [0.1, "0.1", "%", "-1%", True, None])
def test_a_share_without_percent_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="in percent"):
        parse_percent(text)


@pytest.mark.parametrize("text", [90, "90", "", "s", "1x", "1h 30m", True, None])
def test_a_duration_without_meaning_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"unit|duration"):
        parse_duration(text)


def test_a_duration_that_no_clock_can_wait_for_is_refused() -> None:
    assert parse_duration("3650d") == 3650 * 86400
    with pytest.raises(ValueError, match="longer than 3650 days"):
        parse_duration("99999999999d")


@pytest.mark.parametrize("text", [64, "64", "", "64GB", "64gb", "64X", "0.3k2", "1.0001k", True, None])
def test_a_size_without_meaning_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"unit|size|reads two ways|whole number"):
        parse_bytes(text)


@pytest.mark.parametrize("text", [0, "0m", "-1", "two", True, None])
def test_cores_without_meaning_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"CPU quantity|expected cores"):
        parse_cpu(text)


@given(st.integers(0, 2**55))
def test_a_size_prints_and_reads_back_exactly(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.integers(0, 10**9).map(lambda ms: float(Decimal(ms) / 1000)))
def test_a_duration_prints_and_reads_back_exactly(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(1, 10**12))
def test_a_rate_prints_and_reads_back_exactly(rate: int) -> None:
    assert parse_bit_rate(format_bit_rate(rate)) == rate


@given(st.integers(0, 10**6).map(lambda ppm: float(Decimal(ppm) / 10**6)))
def test_a_share_prints_and_reads_back_exactly(share: float) -> None:
    assert parse_percent(format_percent(share)) == share


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_bytes, parse_duration, parse_cpu):
        try:
            parse(text)
        except ValueError:
            continue
