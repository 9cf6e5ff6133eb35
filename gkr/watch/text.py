"""Numbers and bars as short texts, the same on the live screen and in plain lines."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#"


def sparkline(values: Sequence[float], *, width: int, ascii_only: bool = False) -> str:
    """One character per value (means of equal parts when there are more than `width`), lowest to highest.

    Not-finite values as `!`.
    """
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    means = [_mean(values[at : at + size]) for at in range(0, len(values), size)]
    finite = [value for value in means if math.isfinite(value)]
    bars = _ASCII_BARS if ascii_only else _BARS
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] if math.isfinite(value) else "!" for value in means)


def short_duration(seconds: float) -> str:
    """`8s`, `3m05s`, `2h04m`, `3d04h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def short_count(count: float) -> str:
    """`950`, `51.2k`, `3.4M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{count:g}"


def percent(part: float, whole: float) -> str:
    """`42%`, or nothing when there is no whole."""
    return f"{100 * part / whole:.0f}%" if whole else ""


def shortened(text: str, *, width: int) -> str:
    """One line of at most `width` characters; what is left out shows as `...`."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."


def milliseconds(value: float, *, of: int) -> str:
    """`17.8`, or a dash where nothing has been measured: `of` requests were."""
    return f"{value:.1f}" if of else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
