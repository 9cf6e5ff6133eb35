"""Writes benchmarks/README.md from the results, so that no number is typed: `python -m benchmarks._readme`.

A result is a JSON object. What it holds of single values becomes one line or one narrow table, each list of objects a
table of its own; a list that is too long for a page is left to the file.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LONGEST = 30
CHAOS = "python -m tools.chaos sync"
HEAD = """\
# Measured claims

Written by `python -m benchmarks._readme` from `results/*.json`; each number was measured by the command above it,
against what it beats, in one run. `make bench` runs all of them, `make chaos SCENARIO=sync` the campaign of faults. The
machine's cores, and its load where it was not alone, stand with the numbers.
"""


def main() -> int:
    """Write the page."""
    files = sorted((HERE / "results").glob("*.json"))
    text = "\n".join([HEAD, *(section(path) for path in files)])
    (HERE / "README.md").write_text(text)
    return 0


def section(path: Path) -> str:
    """One benchmark: what it claims, the command, the numbers."""
    name = path.stem
    module = HERE / f"{name}.py"
    command = f"python -m benchmarks.{name}" if module.exists() else CHAOS
    source = module if module.exists() else HERE.parent / "tools" / "chaos" / "sync.py"
    claim = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0]
    found = json.loads(path.read_text())
    body = "\n".join(tables(found if isinstance(found, dict) else {"runs": found}))
    return f"## {name}\n\n{' '.join(claim.split())}\n\n    {command}\n\n{body}"


def tables(found: dict[str, Any]) -> Iterator[str]:
    """Single values first, then lists."""
    single = dict(flat(found))
    if single:
        yield "| value | |\n| --- | --- |\n" + "".join(f"| {key} | {show(value)} |\n" for key, value in single.items())
    for key, rows in found.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            yield (
                table(key, [dict(flat(row)) for row in rows])
                if len(rows) <= LONGEST
                else (f"{key}: {len(rows)} rows, in the file.\n")
            )


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Columns in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [title + ":", "", "| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(show(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def flat(found: dict[str, Any], *, above: str = "") -> Iterator[tuple[str, Any]]:
    """Single values, those of inner objects under `outer.inner`; lists are left out, but their lengths stay."""
    for key, value in found.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            yield from flat(value, above=f"{name}.")  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, list):
            words = all(isinstance(one, str) for one in value)
            if above or not value or not isinstance(value[0], dict):
                yield name, ", ".join(value) if words else len(value)
        else:
            yield name, value


def show(value: Any) -> str:
    """Four significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
