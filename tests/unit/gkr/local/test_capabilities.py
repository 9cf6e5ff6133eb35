"""A setting that would be ignored is refused with its remedy, before anything is written."""

from __future__ import annotations

import pytest

from gkr.local.capabilities import refuse_what_is_not_carried_out
from spec.errors import ConfigError
from spec.plan import Plan
from spec.resolve import resolve_located
from tests.builders.experiments import RUN, laptop, load, shipped

DIGITS = shipped("digits").text
OWN = "version: 1\nname: own\ncluster: local-0\ngroups:\n  - {name: a, nodes: 1, ranks: 1}\nrun: echo\n"


def plan_of(text: str, *overrides: str) -> Plan:
    return resolve_located(load(text, overrides=overrides), laptop(), run=RUN, env={}, run_uri="file:///w/runs/x")


@pytest.mark.parametrize("overrides", [(), ("sync.mode=decoupled", "sync.fragments=4", "sync.codec=int8")])
def test_what_is_carried_out_is_not_refused(overrides: tuple[str, ...]) -> None:
    refuse_what_is_not_carried_out(plan_of(DIGITS, *overrides))


@pytest.mark.parametrize(
    ("text", "overrides", "want"),
    [
        (DIGITS + "secrets: [hf-token]\n", (), "hf-token"),
        (DIGITS + "code: .\n", (), "leave it out"),
        (OWN, (), "`train`"),
    ],
    ids=["secrets", "code", "run"],
)
def test_what_is_not_carried_out_is_refused(text: str, overrides: tuple[str, ...], want: str) -> None:
    with pytest.raises(ConfigError, match="cannot run this experiment") as caught:
        refuse_what_is_not_carried_out(plan_of(text, *overrides))
    assert want in caught.value.message
    assert caught.value.exit_code == 3
