"""Plain `pulumi up` and the Automation API run the same function."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pulumi
import pytest

from infra.programs import program
from tests.builders.recorded_clouds import ANSWERS, CLOUDS, LOOKUPS, global_outputs, run_shipped
from tests.builders.recorded_stack import RecordedStack, record
from tests.builders.stack_files import shipped

ROOT = Path(__file__).resolve().parents[4]


def plainly(config: dict[str, str]) -> Callable[[], None]:
    """What the language plugin does: the engine's configuration, then the folder that Pulumi.yaml names."""

    def run() -> None:
        pulumi.runtime.set_all_config(config)
        runpy.run_path(str(ROOT / "infra"), run_name="__main__")

    return run


def run_plainly(name: str) -> RecordedStack:
    value = json.dumps(shipped(name).value.model_dump(mode="json", exclude_unset=True))
    references = {"prod.global": global_outputs("prod.global")}
    return record(plainly({"gkr:stack": value}), stack=name, answers=ANSWERS, lookups=LOOKUPS, references=references)


@pytest.mark.parametrize("name", [one for one in CLOUDS if one.startswith("prod.")])
def test_both_ways_declare_the_same(name: str) -> None:
    plain, automated = run_plainly(name), run_shipped(name)
    assert {repr(one) for one in plain.resources} == {repr(one) for one in automated.resources}
    assert plain.outputs == automated.outputs


def test_a_stack_without_configuration_says_where_it_belongs() -> None:
    with pytest.raises(pulumi.RunError, match=r"stacks/Pulumi\.prod\.us-east5\.yaml"):
        record(plainly({}), stack="prod.us-east5")


def test_a_mistake_in_the_configuration_is_shown_without_a_traceback() -> None:
    value = json.dumps({**shipped("prod.us-east5").value.model_dump(mode="json", exclude_unset=True), "regoin": "x"})
    with pytest.raises(pulumi.RunError, match=r"regoin(.|\n)*hint"):
        record(plainly({"gkr:stack": value}), stack="prod.us-east5")


def test_every_kind_has_a_program() -> None:
    for name in ("prod.global", "prod.us-east5", "prod.us-east5.platform"):
        assert callable(program(name, shipped(name).value))
