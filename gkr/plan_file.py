"""The plan in a run's folder, or why it cannot be read."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from spec.base import first_fault
from spec.errors import DataError
from spec.plan import Plan

_HINT = "without it the run cannot be shown or resumed; `gkr cancel` ends it, `gkr launch FILE` starts a new one"


def read_plan(folder: Path) -> Plan:
    """The plan of the run in `folder`; DataError if it is not there, may not be read, or is not a plan."""
    path = folder / "plan.json"
    try:
        return Plan.read_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"the run's plan cannot be read: {error.strerror}", where=f"{path}", hint=_HINT) from None
    except ValidationError as error:
        raise DataError(f"this is not the plan of a run: {first_fault(error)}", where=f"{path}", hint=_HINT) from None
