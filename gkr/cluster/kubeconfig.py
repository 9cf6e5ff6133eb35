"""Kubeconfig files: one context of one of them, chosen by name, with the files merged as kubectl merges them.

Reads only. A stale context, a context without its cluster, a file that is none: one line each. lightkube's own reader
takes a single file and reports such things as KeyErrors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spec.errors import UnreachableError

_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


@dataclass(frozen=True)
class Context:
    """A context with everything it refers to."""

    name: str
    namespace: str
    cluster: dict[str, Any]
    user: dict[str, Any]
    folder: Path
    """Of the file that names the user: relative commands start there."""

    @property
    def server(self) -> str:
        return str(self.cluster.get("server", ""))


def default_path() -> str:
    """What kubectl would read: KUBECONFIG, which may list several files, else the file in the home folder."""
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def current_context(path: str) -> str:
    """Name of the current context of the files."""
    name = _merged(path).current
    if not name:
        raise UnreachableError(
            f"{path} has no current context", hint="name one with --context, or `kubectl config use-context NAME`"
        )
    return name


def read_context(path: str, *, name: str) -> Context:
    """The context of that name."""
    merged = _merged(path)
    if name not in merged.contexts:
        known = ", ".join(sorted(merged.contexts)[:8]) or "none"
        raise UnreachableError(
            f'there is no context "{name}" in {path} any more (contexts: {known})',
            hint="fetch the cluster's credentials again, or `gkr clusters add ... --replace` with another context",
        )
    context, _ = merged.contexts[name]
    cluster, user = str(context.get("cluster", "")), str(context.get("user", ""))
    if cluster not in merged.clusters:
        raise UnreachableError(
            f'context "{name}" in {path} refers to cluster "{cluster}", which is not there',
            hint="fetch the cluster's credentials again",
        )
    if user and user not in merged.users:
        raise UnreachableError(
            f'context "{name}" in {path} refers to user "{user}", which is not there',
            hint="fetch the cluster's credentials again",
        )
    fields, folder = merged.users.get(user, ({}, Path.cwd()))
    return Context(name, str(context.get("namespace") or ""), merged.clusters[cluster][0], fields, folder)


@dataclass
class _Merged:
    current: str
    contexts: dict[str, tuple[dict[str, Any], Path]]
    clusters: dict[str, tuple[dict[str, Any], Path]]
    users: dict[str, tuple[dict[str, Any], Path]]


def _merged(path: str) -> _Merged:
    """The first file that names something wins."""
    merged = _Merged("", {}, {}, {})
    parts = [Path(part).expanduser() for part in path.split(os.pathsep) if part]
    present = [part for part in parts if part.is_file()]
    if not present:
        raise UnreachableError(f"there is no kubeconfig {path}", hint="name one with --kubeconfig or KUBECONFIG")
    for part in present:
        document = _read(part)
        merged.current = merged.current or str(document.get("current-context") or "")
        for key, into in (("context", merged.contexts), ("cluster", merged.clusters), ("user", merged.users)):
            for entry in cast("list[dict[str, Any]]", document.get(f"{key}s") or []):
                if "name" in entry:
                    into.setdefault(str(entry["name"]), (_absolute(entry.get(key) or {}, part.parent), part.parent))
    return merged


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found: Any = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except OSError as error:
        raise UnreachableError(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
    except yaml.YAMLError as error:
        raise UnreachableError(f"{path} is not YAML: {' '.join(str(error).split())}", hint="mend the file") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UnreachableError(f"{path} is not a kubeconfig", hint="name one with --kubeconfig or KUBECONFIG")
    return cast("dict[str, Any]", found)


def _absolute(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {key: str(folder.absolute() / value) if key in _FILES and value else value for key, value in fields.items()}
