"""What is left of a run when it has ended: summary.json and report.html.

Both are made from plan and events alone, so they can be made again at any time, also of a run that is still going.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gkr.local.files import write_atomically
from gkr.plan_file import read_plan
from gkr.watch.tail import EventTail
from spec.fold import fold

_VERSIONED = ("gkr", "torch", "ray", "pyzmq", "msgspec", "numpy", "scikit-learn", "safetensors")


def conclude(folder: Path) -> Path:
    """Fold the summary and build the report; the report's path."""
    plan = read_plan(folder)
    summary = fold(EventTail(folder).read(), plan, versions=_versions())
    write_atomically(folder / "summary.json", summary.model_dump_json(indent=2) + "\n")
    from gkr.report import build  # matplotlib and its fonts: only once the summary is safe

    return build(folder)


def _versions() -> dict[str, str]:
    """Of what decides the numbers in the summary."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # not installed as a package: a checkout, or a role that is not here
    return found
