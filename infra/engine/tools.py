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


def prepare(where: Place, *, platform: bool) -> None:
    """Find the binaries and lay them out."""
    installed = shutil.which("pulumi")
    if not where.double and installed:
        where.prepare(pulumi=Path(installed).resolve(), kubernetes=None)
        return
    kubernetes = _built("pulumi-resource-kubernetes") if where.double and platform else None
    where.prepare(pulumi=_built("pulumi"), kubernetes=kubernetes)


def local(stack: str, *, double: bool, say: Callable[[str], None]) -> Local:
    """Sizes, images and folders of this machine for a stack of the local environment; nothing for all others."""
    name = parse_stack_name(stack)
    if name.environment != LOCAL or name.kind == "global":
        return Local()
    if not double:
        raise ConfigError(f"{stack} is a test bed's", hint=f"CLOUD=double: make up STACK={stack} CLOUD=double")
    bed: Any = importlib.import_module("tools.local_stacks")
    found = bed.region(name.region) if name.kind == "region" else bed.platform(name.region, say=say)
    overrides = tuple(f"{path}={json.dumps(value)}" for path, value in found.values.items())
    return Local(overrides, dict(found.environment))


def _built(name: str) -> Path:
    binaries: Any = importlib.import_module("tools.binaries")
    try:
        return Path(binaries.binary(name))
    except SystemExit as error:
        raise ConfigError(str(error.code), hint="built once, from source, and kept outside the repository") from None
