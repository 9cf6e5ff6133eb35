"""What the rules compare with, for a stack of a given name among the stacks that the repository ships."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from infra.policy.resource import Settings
from spec.stack_values import parse_stack_name

LABELS = ("managed-by", "gkr-stack")
"""What the programs put on every resource beside a stack's own labels."""
PREFIX, SUFFIX = "Pulumi.", ".yaml"


def stack_names(folder: Path) -> list[str]:
    """Names of all stacks that a folder has a file for."""
    return sorted(path.name.removeprefix(PREFIX).removesuffix(SUFFIX) for path in folder.glob(f"{PREFIX}*{SUFFIX}"))


def settings_for(stack: str, *, stacks: Iterable[str], engine: bool = True, applies: bool = False) -> Settings:
    """A region or platform stack makes things in its region only; a global stack in every region that has a stack."""
    name = parse_stack_name(stack)
    peers = [parse_stack_name(one) for one in stacks]
    regions = {name.region} if name.region else {one.region for one in peers if one.environment == name.environment}
    return Settings(
        environment=name.environment,
        regions=frozenset(one for one in regions if one) if name.environment != "local" else frozenset(),
        labels=LABELS,
        engine=engine,
        applies=applies,
    )
