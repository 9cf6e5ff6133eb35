"""Numbers as people read them. Pure; a missing or non-finite value is an en dash."""

from __future__ import annotations

import math
from datetime import UTC, datetime

MISSING = "\N{EN DASH}"


def duration(seconds: float | None) -> str:
    """`0.42 s`, `8.3 s`, `4 min 12 s`, `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 0.001:
        return "0 s" if seconds <= 0 else "< 1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(value: float | None) -> str:
    """A whole number with thin spaces between thousands."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{round(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def number(value: float | None, *, digits: int = 3) -> str:
    """Significant digits without an exponent where that stays short."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return count(value)
    if abs(value) < 0.0005:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def percent(share: float | None, *, digits: int = 1) -> str:
    """`98.3 %`."""
    return MISSING if share is None or not math.isfinite(share) else f"{share * 100:.{digits}f} %"


def size(byte_count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(byte_count) < 1000:
            return f"{byte_count:.0f} {unit}" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1000
    return f"{byte_count:.1f} TB"


def plural(amount: int, noun: str) -> str:
    """`1 round`, `16 rounds`."""
    ending = "" if amount == 1 else "es" if noun.endswith(("s", "x")) else "s"
    return f"{count(amount)} {noun}{ending}"


def moment(time: float) -> str:
    """A point in time, always UTC, so that the same run draws the same report everywhere."""
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return MISSING


def clock(seconds: float) -> str:
    """Time since the start of the run: `0:42`, `1:05:00`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def clock_step(seconds: float, *, most: int) -> float:
    """Distance of the ticks of a clock that shows `seconds` with at most `most` intervals."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
    return next((float(one) for one in steps if seconds / one <= most), math.ceil(seconds / most / 86_400) * 86_400.0)
