"""Stack configuration: what `stacks/Pulumi.<stack>.yaml` says under `gkr:stack`, read and checked.

The models are in spec/stack_global.py, stack_region.py and stack_platform.py; rules over more than one value in
stack_checks.py and stack_cross_checks.py. Pure: texts and names come in. Nothing here asks the cloud, and no secret is
in any of these documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from spec.base import Document
from spec.document import Located, validate
from spec.nodes import Mark, Node, Source, read_tree
from spec.overrides import apply_overrides
from spec.problems import DocumentError, Problem, did_you_mean
from spec.refusals import Refusal, ResolveError
from spec.stack_checks import check_stack
from spec.stack_cross_checks import check_all
from spec.stack_global import GlobalStack
from spec.stack_platform import PlatformStack
from spec.stack_region import RegionStack
from spec.stack_values import StackName, parse_stack_name

__all__ = [
    "FOLDER", "KEY", "PROJECT", "GlobalStack", "PlatformStack", "RegionStack", "StackConfig", "StackName", "check_all",
    "check_stack", "load_stack", "parse_stack_name", "read_stack", "refuse", "refuse_all", "stack_file", "upstream",
]  # fmt: skip

StackConfig = Annotated[GlobalStack | RegionStack | PlatformStack, Field(discriminator="kind")]
"""One of the three kinds, told apart by `kind`."""

PROJECT = "gkr"
"""The Pulumi project."""
KEY = "gkr:stack"
"""The one configuration key, with all of a stack's configuration below it."""
FOLDER = "stacks"
"""Folder of the stack files."""
_KINDS: Mapping[str, type[Document]] = {"global": GlobalStack, "region": RegionStack, "platform": PlatformStack}
_SETTINGS = frozenset({"config", "secretsprovider", "encryptedkey", "encryptionsalt", "environment"})
"""Top-level keys of a stack file; all but `config` are written by the engine."""

AnyStack = GlobalStack | RegionStack | PlatformStack
"""The same without what only the schema needs."""


def stack_file(name: str) -> str:
    """Where a stack's configuration is, from the repository's root."""
    return f"{FOLDER}/Pulumi.{name}.yaml"


def load_stack(text: str, name: str, *, overrides: tuple[str, ...] = ()) -> Located[AnyStack]:
    """The configuration in the text of a stack file, checked by itself; DocumentError has every reason against it."""
    source = Source(text, stack_file(name))
    tree = read_tree(source)
    problems = [
        (one.key_mark or one.mark).problem(
            f'unknown key "{key}" in a stack file', path=key, hint=f"settings of the stack belong below config: {KEY}:"
        )
        for key, one in tree.entries.items()
        if key not in _SETTINGS
    ]
    if problems:
        raise DocumentError(problems)
    config = tree.entries.get("config")
    body = config.child(KEY) if config is not None else None
    if body is None or body.kind != "mapping":
        place = (body or config or tree).mark
        raise DocumentError(
            [place.problem(f"there is no {KEY}; the program would not know what to make", hint=f"add config: {KEY}:")]
        )
    return _located(body, name=name, overrides=overrides)


def read_stack(value: object, name: str) -> Located[AnyStack]:
    """The same from what the engine hands a program: plain data without places."""
    source = Source(json.dumps(value, indent=2), f"{stack_file(name)} ({KEY} as the engine read it)")
    return _located(read_tree(source), name=name)


def _located(body: Node, *, name: str, overrides: tuple[str, ...] = ()) -> Located[AnyStack]:
    tree = apply_overrides(body, overrides=overrides)
    model = _model(tree, default=body.key_mark or body.mark)
    found = validate(tree, model=model)
    refuse(found, check_stack(found.value, name=name))  # pyright: ignore[reportArgumentType]
    return found  # pyright: ignore[reportReturnType]


def _model(tree: Node, *, default: Mark) -> type[Document]:
    kind = tree.entries.get("kind")
    if kind is None:
        hint = f"add kind: {', '.join(_KINDS)}"
        raise DocumentError([default.problem('missing key "kind"', path="kind", hint=hint)])
    if str(kind.value) not in _KINDS:
        hint = did_you_mean(kind.text, _KINDS, noun="kinds")
        raise DocumentError([kind.mark.problem(f'there is no kind of stack "{kind.text}"', path="kind", hint=hint)])
    return _KINDS[str(kind.value)]


def refuse(document: Located[AnyStack], refusals: list[Refusal]) -> None:
    """Raises the refusals with file and line; returns if there are none."""
    if refusals:
        raise ResolveError(refusals).locate(document)


def refuse_all(documents: Mapping[str, Located[AnyStack]]) -> None:
    """Checks stacks against each other and raises everything that was found, at its file and line."""
    problems: list[Problem] = []
    for one in check_all({name: document.value for name, document in documents.items()}):
        name = str(one.path[0])
        inside = replace(one, path=one.path[1:], also=())
        message = one.message
        if one.also:
            others = (documents[str(other[0])].where(other[1:]) for other in one.also if str(other[0]) in documents)
            message += f"; see also {', '.join(others)}"
        problems.append(documents[name].problem(inside.path, message, hint=one.hint, key=one.key))
    if problems:
        raise DocumentError(problems)


def upstream(config: AnyStack) -> str:
    """The stack whose outputs it reads; empty for a global stack."""
    if isinstance(config, PlatformStack):
        return config.region_stack
    return config.global_stack if isinstance(config, RegionStack) else ""
