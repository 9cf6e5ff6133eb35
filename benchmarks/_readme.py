"""Writes benchmarks/README.md from the results, so that no number is typed: `python -m benchmarks._readme`.

All verdicts stand in one table on top. Below it each result has a section: single values become one narrow table, each
list of objects, and each object of like objects, a table of its own. A wide table with few rows is turned on its side;
one that is too long or too wide for a page is left to the file, as are lists of bare numbers.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from benchmarks._verdicts import RESULTS, cells, read_verdicts, show

HERE = Path(__file__).parent
LONGEST, WIDEST = 30, 12
FEW_ROWS = 6
CHAOS = "chaos_"
HEAD = """\
# Measured claims

Written by `python -m benchmarks._readme` from `results/*.json`; each number was measured by the command of its section,
against what it beats, in one run. `make bench` runs all of them, `make chaos SCENARIO=sync` the campaign of faults. The
machine's cores, and its load where it was not alone, stand with the numbers.
"""


def main() -> int:
    """Write the page."""
    (HERE / "README.md").write_text(page(sorted(RESULTS.glob("*.json"))))
    return 0


def page(files: Iterable[Path]) -> str:
    """Verdicts, then a section for each file."""
    files = list(files)
    rows = [{**cells(row), "benchmark": path.stem} for path in files for row in read_verdicts(path)]
    verdicts = [f"## Verdicts\n\n{grid(rows)}"] if rows else []
    return "\n".join([HEAD, *verdicts, *(section(path) for path in files)])


def section(path: Path) -> str:
    """One benchmark: what it claims, the command, the numbers."""
    source, command = HERE / f"{path.stem}.py", f"python -m benchmarks.{path.stem}"
    if path.stem.startswith(CHAOS):
        scenario = path.stem.removeprefix(CHAOS)
        source, command = HERE.parent / "tools" / "chaos" / f"{scenario}.py", f"python -m tools.chaos {scenario}"
    claim = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n\n")[0]
    found = json.loads(path.read_text())
    body = "\n".join(tables(found if isinstance(found, dict) else {"runs": found}))
    return f"## {path.stem}\n\n{' '.join(claim.split())}\n\n    {command}\n\n{body}"


def tables(found: dict[str, Any]) -> Iterator[str]:
    """Single values first, then what is a table by itself."""
    found = {key: value for key, value in found.items() if key != "verdicts"}
    single = dict(flat({key: value for key, value in found.items() if not is_table(value)}))
    if single:
        yield grid([{"value": key, "": value} for key, value in single.items()])
    for key, value in found.items():
        if is_table(value):
            rows = [{key: name, **row} for name, row in value.items()] if isinstance(value, dict) else value
            yield table(key, [dict(flat(row)) for row in rows])


def is_table(value: Any) -> TypeGuard[list[dict[str, Any]] | dict[str, dict[str, Any]]]:
    """A list of objects, or an object of objects with the same keys."""
    if isinstance(value, dict):
        keys = [tuple(one) for one in value.values() if isinstance(one, dict)]
        return len(keys) == len(value) > 1 and len(set(keys)) == 1 and any(flat(next(iter(value.values()))))
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """With a title, if a page is wide and long enough for it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if len(columns) > WIDEST and len(rows) <= FEW_ROWS:
        rows = [{title: column, **{str(n): row.get(column) for n, row in enumerate(rows, 1)}} for column in columns]
    elif len(columns) > WIDEST or len(rows) > LONGEST:
        return f"{title}: {len(rows)} rows of {len(columns)} values, in the file.\n"
    return f"{title}:\n\n{grid(rows)}"


def grid(rows: list[dict[str, Any]]) -> str:
    """Columns in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(show(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def flat(found: dict[str, Any], *, above: str = "") -> Iterator[tuple[str, Any]]:
    """Single values, those of inner objects under `outer.inner`; of lists only words, and how many objects."""
    for key, value in found.items():
        name = f"{above}{key}"
        if isinstance(value, dict):
            yield from flat(value, above=f"{name}.")  # pyright: ignore[reportUnknownArgumentType]
        elif not isinstance(value, list):
            yield name, value
        elif all(isinstance(one, str) for one in value):
            yield name, ", ".join(value)
        elif isinstance(value[0], dict):
            yield name, len(value)


if __name__ == "__main__":
    sys.exit(main())
