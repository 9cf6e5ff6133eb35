"""Results to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click


def result(text: str) -> None:
    """A line of the result."""
    click.echo(text)


def result_json(value: Any) -> None:
    """The result as one JSON document."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def say(text: str) -> None:
    """A line for the person, not part of the result."""
    click.echo(text, err=True)


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str]) -> str:
    """Columns as wide as their content; the last one is not padded. Plain text, so that it pipes."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
