"""Plain `pulumi up` and the Automation API run the same function."""

from __future__ import annotations

import dataclasses
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulumi
import pytest

import infra.run
from infra.engine.place import Place
from infra.engine.stacks import Stack
from infra.programs import Program, program
from spec.stack import AnyStack
from tests.builders.platforms import outputs
from tests.builders.recorded_clouds import ANSWERS, LOOKUPS, global_outputs
from tests.builders.recorded_stack import RecordedStack, record
from tests.builders.stack_files import NAMES, shipped

ROOT = Path(__file__).resolve().parents[4]
given: list[Program] = []
"""Programs that the double of the Automation API was given."""


def plainly(config: dict[str, str]) -> Callable[[], None]:
    """What the language plugin does: the engine's configuration, then the folder that Pulumi.yaml names."""

    def run() -> None:
        pulumi.runtime.set_all_config(config)
        runpy.run_path(str(ROOT / "infra"), run_name="__main__")

    return run


class AutomatedDouble(Stack):
    """A stack of the Automation API without its engine: keeps the program that the engine would be given."""

    def _open(self, *, create: bool, seconds: float = 0.0) -> Any:
        del create, seconds
        return _Engine()


class _Engine:
    def preview(self, *, program: Program, on_event: object, suppress_progress: bool) -> None:
        del on_event, suppress_progress
        given.append(program)

    up = preview


def declared(run: Callable[[], Any], name: str) -> RecordedStack:
    config: Any = shipped(name).value
    if name.endswith(".platform"):
        references = {config.region_stack: outputs(config.region_stack)}
    else:
        references = {} if name.endswith(".global") else {config.global_stack: global_outputs(config.global_stack)}
    return record(run, stack=name, answers=ANSWERS, lookups=LOOKUPS, references=references)


def run_plainly(name: str) -> RecordedStack:
    value = json.dumps(shipped(name).value.model_dump(mode="json", exclude_unset=True))
    return declared(plainly({"gkr:stack": value}), name)


@pytest.mark.parametrize("name", [one for one in NAMES if one.startswith("prod.")])
def test_both_ways_declare_the_same(name: str, tmp_path: Path) -> None:
    given.clear()
    config = shipped(name).value
    AutomatedDouble(name, config, Place(tmp_path, double=True), print, 60.0, {}).preview()
    plain, automated = run_plainly(name), declared(given[0], name)
    assert len(automated.resources) > 40
    places = [sorted((one.type, one.name, one.parents) for one in way.resources) for way in (plain, automated)]
    assert places[0] == places[1]
    assert {repr(one) for one in plain.resources} == {repr(one) for one in automated.resources}
    assert plain.outputs == automated.outputs


def test_both_ways_call_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain `pulumi up` looks it up where it is defined; the make targets and `Stack` hold the same one."""
    called: list[str] = []

    def other(stack: str, config: AnyStack) -> Program:
        called.append(f"{stack} {config.kind}")

        async def run() -> None:
            return None

        return run

    monkeypatch.setattr("infra.programs.program", other)
    run_plainly("prod.global")
    assert called == ["prod.global global"]
    assert {one.name: one.default for one in dataclasses.fields(Stack)}["declare"] is program
    assert infra.run.program is program


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
