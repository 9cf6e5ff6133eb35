"""What of this machine goes into a run: binaries, and for a local environment the test bed's sizes and folders.

`tools` is imported only here and only when it is needed: against Google Cloud an installed Pulumi is enough.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.engine.place import Place
from spec.errors import ConfigError
from spec.stack import parse_stack_name

LOCAL = "local"
"""Environment whose regions are the test bed's."""


@dataclass(frozen=True)
class Local:
    """What a stack file of the local environment leaves open."""

    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    cluster: bool = True
    """Something answers as the cluster of its region."""
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Its secret configuration: Secret to its keys and values."""


def prepare(where: Place, *, platform: bool) -> None:
    """Find the binaries and lay them out."""
    installed = shutil.which("pulumi")
    if not where.double and installed:
        where.prepare(pulumi=Path(installed).resolve(), kubernetes=None)
        return
    kubernetes = _built("pulumi-resource-kubernetes") if where.double and platform else None
    where.prepare(pulumi=_built("pulumi"), kubernetes=kubernetes)


def local(stack: str, *, double: bool, say: Callable[[str], None]) -> Local:
    """Sizes, images and folders of this machine for a stack of the local environment; for others with the double, the
    operators' charts, since there is no registry to pull them from.
    """
    name = parse_stack_name(stack)
    on_bed = name.environment == LOCAL and name.kind != "global"
    if on_bed and not double:
        raise ConfigError(f"{stack} is a test bed's", hint=f"CLOUD=double: make up STACK={stack} CLOUD=double")
    if not double or name.kind == "global" or (name.kind == "region" and not on_bed):
        return Local()
    own: Any = importlib.import_module("tools.local_stacks")
    if not on_bed:
        say(f"{stack}: charts of Kueue and KubeRay from their Go modules, not from the configured registry")
        found, there = own.charts(), False
    else:
        there = own.bed_of(name.region) is not None
        found = own.region() if name.kind == "region" else own.platform(name.region)
    overrides = tuple(f"{path}={json.dumps(value)}" for path, value in found.values.items())
    return Local(overrides, dict(found.environment), cluster=there, secrets=found.secrets)


def refuse_other_use(stack: str, *, is_up: Callable[[], bool]) -> None:
    """ConfigError where a stack of the local environment would come into a test bed that is not as its state says."""
    name = parse_stack_name(stack)
    if name.environment == LOCAL and name.kind != "global":
        own: Any = importlib.import_module("tools.local_stacks")
        own.refuse_other_use(name.region, published=name.kind == "platform" and is_up())


def _built(name: str) -> Path:
    binaries: Any = importlib.import_module("tools.binaries")
    try:
        return Path(binaries.binary(name))
    except SystemExit as error:
        raise ConfigError(str(error.code), hint="built once, from source, and kept outside the repository") from None
