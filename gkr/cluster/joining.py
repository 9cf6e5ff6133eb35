"""Adding a cluster: choose the context once, read the facts its platform published, remember both."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gkr.cluster.calls import each
from gkr.cluster.connection import Connection, connect
from gkr.cluster.fields import part
from gkr.cluster.kubeconfig import current_context, default_path, read_context
from gkr.cluster.registry import ClusterEntry, add_entry, cached_facts, localised, read_registry, save_facts
from spec.errors import ConfigError, GkrError, NotFoundError, RefusedError
from spec.facts import ClusterFacts
from spec.names import check_label
from spec.problems import RemedyError

FACTS_NAMESPACE, FACTS_NAME, FACTS_KEY = "gkr-system", "gkr-facts", "facts.json"
_RESERVED = "local"


def join(
    name: str,
    *,
    kubeconfig: str | None,
    context: str | None,
    namespace: str | None,
    facts: Path | None,
    replace: bool,
) -> tuple[ClusterEntry, ClusterFacts]:
    """Remember a cluster; the entry and its facts as they hold here."""
    _check_name(name)
    path = _absolute(kubeconfig or default_path())
    chosen = read_context(path, name=context or current_context(path))
    entry = ClusterEntry(name, path, chosen.name, namespace=namespace or chosen.namespace)
    connection = connect(entry)
    try:
        found = _from_file(facts) if facts is not None else read_facts(connection)
    finally:
        connection.close()
    add_entry(entry, facts=found, replace=replace)
    return entry, localised(found, entry)


def read_facts(connection: Connection) -> ClusterFacts:
    """What the platform stack published in the cluster."""
    try:
        data = part(connection.get("ConfigMap", FACTS_NAME, namespace=FACTS_NAMESPACE), "data")
    except NotFoundError:
        raise NotFoundError(
            f"it publishes no facts: there is no ConfigMap {FACTS_NAMESPACE}/{FACTS_NAME}",
            where=f"cluster {connection.name}",
            hint="deploy its platform stack, or give the facts with --facts FILE",
        ) from None
    try:
        return ClusterFacts.read_json(data[FACTS_KEY])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"its facts cannot be read: {' '.join(str(error).split())[:200]}",
            where=f"cluster {connection.name}",
            hint="deploy its platform stack again",
        ) from None


def refresh_facts(entry: ClusterEntry, connection: Connection) -> bool:
    """Read the facts again; true if they have changed since they were kept."""
    found = read_facts(connection)
    if localised(found, entry) == cached_facts(entry):
        return False
    save_facts(entry, found)
    return True


def refresh_known(names: Iterable[str]) -> bool:
    """Read the facts of these clusters again where they are published to us; true if any has changed."""
    registry = read_registry()
    entries = [registry.entries[name] for name in dict.fromkeys(names) if name in registry.entries]
    return any(each(entries, _refreshed))


def _refreshed(entry: ClusterEntry) -> bool:
    connection = connect(entry)
    try:
        return refresh_facts(entry, connection)
    except (NotFoundError, RefusedError):
        return False  # facts that came from a file, or are not ours to read
    finally:
        connection.close()


def describe_all(*, check: bool) -> list[dict[str, Any]]:
    """A row for each cluster that was added."""
    registry = read_registry()
    entries = list(registry.entries.values())
    states = each(entries, _state) if check else [""] * len(entries)
    return [_row(entry, state, default=registry.default) for entry, state in zip(entries, states, strict=True)]


def _row(entry: ClusterEntry, state: str, *, default: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": entry.name, "default": entry.name == default, "context": entry.context}
    row["kubeconfig"] = entry.kubeconfig
    try:
        facts = cached_facts(entry)
    except GkrError as error:
        return row | {"region": "?", "gpus": "", "namespace": entry.namespace, "state": state or error.message}
    place = {"region": facts.region, "gpus": ", ".join(facts.gpu_types()), "namespace": ", ".join(facts.namespaces)}
    return row | place | {"state": state}


def _state(entry: ClusterEntry) -> str:
    try:
        connection = connect(entry)
        try:
            return "answers, new facts" if refresh_facts(entry, connection) else "answers"
        finally:
            connection.close()
    except GkrError as error:
        return error.message


def _from_file(path: Path) -> ClusterFacts:
    from gkr.loading import load_facts

    found = load_facts(path)
    if len(found) != 1:
        raise ConfigError(f"it has the facts of {len(found)} clusters", where=str(path), hint="give one cluster's")
    return found[0]


def _check_name(name: str) -> None:
    if name == _RESERVED or name.startswith(f"{_RESERVED}-"):
        raise ConfigError(f'"{name}" names this machine', hint="take another name for a cluster")
    try:
        check_label(name)
    except RemedyError as error:
        raise ConfigError(str(error), hint=error.hint) from None


def _absolute(path: str) -> str:
    return os.pathsep.join(str(Path(part).expanduser().absolute()) for part in path.split(os.pathsep) if part)
