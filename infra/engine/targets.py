"""Which stacks a target means, in which order, and what they build on. Pure but for reading the stack files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from infra.engine.place import ROOT
from spec.document import Located
from spec.errors import ConfigError
from spec.problems import did_you_mean
from spec.stack import AnyStack, load_stack, parse_stack_name, refuse_all, stack_file, upstream
from spec.stack_values import StackName

Only = Literal["", "platform", "region"]


def shipped(root: Path = ROOT) -> list[str]:
    """Names of all stacks that have a file."""
    folder = root / "stacks"
    return sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in folder.glob("Pulumi.*.yaml"))


def members(target: str, *, only: Only = "", known: list[str] | None = None) -> list[str]:
    """The stacks of a target, in the order in which they are brought up. A region includes its platform."""
    names = shipped() if known is None else known
    if target not in names:
        raise ConfigError(f'there is no stack "{target}"', hint=did_you_mean(target, names, noun="stacks"))
    name = parse_stack_name(target)
    platform = str(StackName(name.environment, name.region, "platform"))
    if name.kind == "platform" or (only == "platform" and name.kind == "region"):
        if only == "region":
            raise ConfigError(f"{target} is a platform stack", hint=f"STACK={target.removesuffix('.platform')}")
        return [platform]
    if name.kind == "global" and only:
        raise ConfigError(f"{target} is a global stack; it has no {only}", hint="leave ONLY out")
    return [target, platform] if name.kind == "region" and not only and platform in names else [target]


def load(name: str, *, overrides: tuple[str, ...] = (), root: Path = ROOT) -> Located[AnyStack]:
    """A stack's configuration, checked by itself and against all others that have a file."""
    documents = {one: _read(one, root, overrides if one == name else ()) for one in shipped(root)}
    refuse_all(documents)
    return documents[name]


def below(config: AnyStack, *, root: Path = ROOT) -> list[str]:
    """The stacks that must be up first, lowest first."""
    found: list[str] = []
    name = upstream(config)
    while name:
        found.append(name)
        name = upstream(_read(name, root, ()).value)
    return found[::-1]


def _read(name: str, root: Path, overrides: tuple[str, ...]) -> Located[AnyStack]:
    path = root / stack_file(name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=stack_file(name)) from None
    return load_stack(text, name, overrides=overrides)
