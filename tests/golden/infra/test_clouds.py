"""What each shipped global and region stack declares, compared with what was looked at and accepted.

A name or parent that changes here is a resource that the engine deletes and makes anew, unless an alias comes with it:
for a pool that is its machines. After a change that is meant: `GKR_UPDATE_GOLDEN=1 .venv/bin/python -m pytest
tests/golden/infra`, then read the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders.golden import check_golden
from tests.builders.recorded_clouds import CLOUDS, run_shipped
from tests.builders.recorded_stack import Recorded

EXPECTED = Path(__file__).parent / "clouds"
LEFT_OUT = {"project", "labels", "resourceLabels", "userLabels"}
"""Equal everywhere."""


def _kept(one: Recorded) -> dict[str, Any]:
    found: dict[str, Any] = {"type": one.type, "name": one.name, "in": list(one.parents)}
    options = {
        "protect": one.protect, "retain": one.retain_on_delete, "delete first": one.delete_before_replace,
        "timeout": one.timeouts[0], "ignored": list(one.ignore_changes), "aliases": list(one.aliases),
    }  # fmt: skip
    if set_options := {key: value for key, value in options.items() if value}:
        found["options"] = set_options
    if inputs := {key: value for key, value in one.inputs.items() if key not in LEFT_OUT}:
        found["inputs"] = inputs
    return found


@pytest.mark.parametrize("name", CLOUDS)
def test_a_stack_declares_what_was_accepted(name: str) -> None:
    kept = sorted((_kept(one) for one in run_shipped(name).resources), key=lambda one: (one["type"], one["name"]))
    actual = yaml.safe_dump(kept, width=120, allow_unicode=True, default_flow_style=None)
    path = EXPECTED / f"{name}.yaml"
    check_golden(actual, path=path)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in EXPECTED.glob("*.yaml")} == set(CLOUDS)
