"""Objects of shared services, compared with the files that were looked at and accepted; see test_manifests.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests.labels import PLAN_SHA256
from manifests.shared import shared_objects
from tests.builders.golden import check_golden
from tests.builders.shared import SHARED

EXPECTED = Path(__file__).parent / "expected" / "shared"


def _without_plan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_plan(one) for one in value]
    if not isinstance(value, dict):
        return value
    hidden = {"plan.json": "(the plan)\n", PLAN_SHA256: "(its digest)"}
    return {key: hidden[key] if key in hidden else _without_plan(one) for key, one in value.items()}


@pytest.mark.parametrize("case", sorted(SHARED))
def test_objects_are_those_that_were_accepted(case: str) -> None:
    path = EXPECTED / f"{case}.yaml"
    actual = yaml.safe_dump_all(_without_plan(shared_objects(SHARED[case])), allow_unicode=True, width=120)
    check_golden(actual, path=path)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in EXPECTED.glob("*.yaml")} == set(SHARED)
