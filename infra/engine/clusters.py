"""Clusters of stacks, as `gkr` knows them: what `make train STACK=` launches on.

A stack's cluster is added to the person's list under its own name, reached as its region stack says and with the facts
that its platform published in it. An entry of that name that the person made stays as it is. `gkr` itself knows no
stacks: it is called as a command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from infra.engine.place import Place
from spec.errors import ConfigError, GkrError, UnreachableError

SECONDS = 60.0
"""Of one call of `gkr`."""


@dataclass(frozen=True)
class Cluster:
    """The cluster of a region that is up."""

    stack: str
    """Of the region."""
    facts: Mapping[str, Any]
    """`spec.facts.ClusterFacts`, as the platform stack's output has them."""
    kubeconfig: str
    """As the region stack's output has it."""

    @property
    def name(self) -> str:
        """In the cloud, and in the person's list."""
        return str(self.facts["name"])


def take(cluster: Cluster, *, where: Place) -> str:
    """Add it to the person's list; what was done, in words."""
    path = _kubeconfig(where, cluster.stack)
    present = next((one for one in known() if one["name"] == cluster.name), None)
    if present is not None and present["kubeconfig"] != f"{path}":
        return f"{cluster.name}: as it was added before, context {present['context']} of {present['kubeconfig']}"
    _write_private(path, cluster.kubeconfig)
    _gkr("clusters", "add", cluster.name, "--kubeconfig", f"{path}", "--context", cluster.name, "--replace")
    return f"{cluster.name}: stack {cluster.stack}, region {cluster.facts['region']}"


def forget(stack: str, *, where: Place) -> None:
    """Take the cluster of a stack that is gone off the list, if it is there through `take`."""
    path = _kubeconfig(where, stack)
    for one in known() if path.is_file() else ():
        if one["kubeconfig"] == f"{path}":
            _gkr("clusters", "remove", str(one["name"]))
    path.unlink(missing_ok=True)


def of_region(region: str) -> str:
    """The one cluster of the list that has this name, or else is in this region."""
    every = known()
    named = [one for one in every if one["name"] == region] or [one for one in every if one["region"] == region]
    if len(named) == 1:
        return str(named[0]["name"])
    several = ", ".join(str(one["name"]) for one in named)
    raise ConfigError(
        f"{several} are all in region {region}" if several else f"no cluster of region {region} has been added",
        hint="name one of them" if several else f"gkr clusters add {region}, or name its stack: STACK=ENV.{region}",
    )


def known() -> list[dict[str, Any]]:
    """The person's list."""
    return cast("list[dict[str, Any]]", json.loads(_gkr("clusters", "list", "-o", "json")))


def _kubeconfig(where: Place, stack: str) -> Path:
    return where.folder / "kubeconfigs" / f"{stack}.json"


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def _gkr(*arguments: str) -> str:
    command = [str(Path(sys.prefix) / "bin" / "gkr"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except FileNotFoundError:
        raise ConfigError(f"gkr is not installed in {sys.prefix}", hint="make setup") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"gkr {' '.join(arguments[:3])} did not end within {SECONDS:.0f} s") from None
    if done.returncode:
        raise GkrError(f"gkr {' '.join(arguments[:3])}: {done.stderr.strip()[-500:]}")
    return done.stdout
