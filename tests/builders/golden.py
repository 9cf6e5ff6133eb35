"""Comparison with a file that a person looked at and accepted."""

from __future__ import annotations

import os
from pathlib import Path

UPDATE = "GKR_UPDATE_GOLDEN"
"""Environment variable with which the files are written again; then read the difference."""


def check_golden(actual: str, *, path: Path) -> None:
    """AssertionError unless the file holds exactly this text."""
    if os.environ.get(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual, encoding="utf-8")
    assert path.is_file(), f"no golden file; make it with {UPDATE}=1"
    assert actual == path.read_text(encoding="utf-8"), f"if this is meant: {UPDATE}=1, then read the difference"
