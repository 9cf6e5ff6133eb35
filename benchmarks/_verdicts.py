"""What a measured number is worth: a row that says what it is compared with and whether its target holds.

Each benchmark writes its rows as `verdicts` into its results, so that the page of all results and the last lines of
`python -m benchmarks` are made from them and no judgement is typed by hand.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

COLUMNS = ("what", "measured", "against", "ratio", "target", "verdict")


def verdict(
    what: str,
    *,
    measured: float,
    unit: str,
    against: str = "",
    ratio: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> dict[str, object]:
    """One row. A bound applies to `ratio` if there is one, else to `measured`; without a bound the row only reports.

    `against` says what the ratio compares with, and how much that was.
    """
    judged, sign = (measured, f" {unit}") if ratio is None else (ratio, " x")
    given = {">=": at_least, "<=": at_most}
    bounds = [f"{word} {show(bound)}{sign}".rstrip() for word, bound in given.items() if bound is not None]
    # Written so that a NaN misses.
    holds = (at_least is None or judged >= at_least) and (at_most is None or judged <= at_most)
    return {
        "what": what,
        "measured": measured,
        "unit": unit,
        "against": against,
        "ratio": ratio,
        "target": " and ".join(bounds),
        "verdict": "reported" if not bounds else "met" if holds else "missed",
    }


def machine() -> dict[str, object]:
    """Where something was measured, and how busy others kept it."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Keep what a benchmark found, and print its verdicts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in result.get("verdicts", ()):
        print(f"{path.stem}: {sentence(row)}", flush=True)


def read_verdicts(path: Path) -> list[dict[str, Any]]:
    """The rows of one result; none if it judges nothing."""
    found = json.loads(path.read_text())
    return found.get("verdicts", []) if isinstance(found, dict) else []


def sentence(row: dict[str, Any]) -> str:
    """A row for a terminal."""
    words = [f"{row['what']}: {show(row['measured'])} {row['unit']}".rstrip()]
    if row["ratio"] is not None or row["against"]:
        times = "" if row["ratio"] is None else f"{show(row['ratio'])} x "
        words.append(f"{times}{row['against']}".strip())
    if row["target"]:
        words.append(f"target {row['target']}")
    return f"{', '.join(words)}: {row['verdict']}"


def cells(row: dict[str, Any]) -> dict[str, str]:
    """A row for a table."""
    shown = {column: show(row[column]) for column in COLUMNS}
    shown["measured"] = f"{shown['measured']} {row['unit']}".rstrip()
    return shown


def aligned(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """Lines of a table for a terminal."""
    columns = list(rows[0]) if rows else []
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in columns}
    for row in (dict(zip(columns, columns, strict=True)), *rows):
        yield "  ".join(row[column].ljust(widths[column]) for column in columns).rstrip()


def show(value: Any) -> str:
    """Four significant digits; thousands apart."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value).replace("|", "\\|")
    if isinstance(value, int) or value.is_integer():
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.0f}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
