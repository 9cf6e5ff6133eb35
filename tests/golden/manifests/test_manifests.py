"""Every object of every case, compared with the file that was looked at and accepted.

After a change that is meant: `GKR_UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/golden/manifests`, then read the
difference (`git diff tests/golden`) before committing it. The plan itself and its digest are left out of the files:
they change whenever a plan gets a field, which says nothing about the objects; `tests/unit/manifests` compares them
exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests.labels import PLAN_SHA256
from manifests.render import render
from tests.builders.golden import check_golden
from tests.builders.plans import CASES

EXPECTED = Path(__file__).parent / "expected"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _without_plan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_plan(one) for one in value]
    if not isinstance(value, dict):
        return value
    hidden = {"plan.json": "(the plan)\n", PLAN_SHA256: "(its digest)"}
    return {key: hidden[key] if key in hidden else _without_plan(one) for key, one in value.items()}


def _rendered(case: str) -> str:
    parts = []
    for name, objects in render(CASES[case]()).items():
        for one in objects:
            text = yaml.dump(_without_plan(one), Dumper=_Dumper, allow_unicode=True, width=120)
            parts.append(f"# cluster {name}\n{text}")
    return "---\n".join(parts)


@pytest.mark.parametrize("case", sorted(CASES))
def test_objects_are_those_that_were_accepted(case: str) -> None:
    path, actual = EXPECTED / f"{case}.yaml", _rendered(case)
    check_golden(actual, path=path)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in EXPECTED.glob("*.yaml")} == set(CASES)


def test_a_golden_file_is_what_a_reader_of_yaml_sees() -> None:
    for case in CASES:
        documents = list(yaml.safe_load_all((EXPECTED / f"{case}.yaml").read_text(encoding="utf-8")))
        objects = [one for found in render(CASES[case]()).values() for one in found]
        assert documents == _without_plan(objects)
