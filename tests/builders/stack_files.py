"""The shipped stacks, whole or with values changed."""

from __future__ import annotations

from pathlib import Path

from spec.document import Located
from spec.problems import DocumentError, Problem
from spec.stack import AnyStack, load_stack, refuse_all, stack_file

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in (ROOT / "stacks").glob("*.yaml"))


def stack_text(name: str) -> str:
    """The file of a shipped stack."""
    return (ROOT / stack_file(name)).read_text(encoding="utf-8")


def shipped(name: str, *changes: str) -> Located[AnyStack]:
    """A shipped stack with changes as `--set` takes them."""
    return load_stack(stack_text(name), name, overrides=changes)


def problems_of(name: str, *changes: str) -> list[Problem]:
    """What is wrong with a shipped stack after the changes."""
    try:
        shipped(name, *changes)
    except DocumentError as error:
        return list(error.problems)
    return []


def problems_between(*changes: tuple[str, str]) -> list[Problem]:
    """What is wrong between all shipped stacks after changes to some, each fine by itself."""
    documents = {name: shipped(name, *(text for stack, text in changes if stack == name)) for name in NAMES}
    try:
        refuse_all(documents)
    except DocumentError as error:
        return list(error.problems)
    return []
