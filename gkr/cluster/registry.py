"""The clusters that `gkr` knows: a short name for a kubeconfig's context, and the facts its platform published.

One file, `clusters.yaml` in the configuration folder, and the facts of each cluster beside it in `facts/`, which also
serve completion (no YAML is read for a TAB). An entry keeps kubeconfig and context, so that switching the current
context never sends a command to another cluster.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from spec.errors import ConfigError, NotFoundError, RefusedError

if TYPE_CHECKING:
    from spec.facts import ClusterFacts

_FILE = "clusters.yaml"


@dataclass(frozen=True)
class ClusterEntry:
    """One cluster as a person added it."""

    name: str
    kubeconfig: str
    """One path, or several as in KUBECONFIG."""
    context: str
    namespace: str = ""
    """Where its runs go instead of the namespaces of its facts; empty: those."""


@dataclass(frozen=True)
class Registry:
    """All entries by name, and the one that is used where none is named."""

    entries: Mapping[str, ClusterEntry]
    default: str = ""

    def get(self, name: str) -> ClusterEntry:
        """The entry, or NotFoundError with the near ones."""
        if name in self.entries:
            return self.entries[name]
        from difflib import get_close_matches

        near = get_close_matches(name, self.entries, n=1)
        known = ", ".join(sorted(self.entries))
        hint = f'did you mean "{near[0]}"?' if near else f"known: {known}" if known else "`gkr clusters add NAME`"
        raise NotFoundError(f'no cluster "{name}" has been added', hint=hint)


def config_folder() -> Path:
    """GKR_CONFIG, else gkr in the user's configuration folder."""
    own = os.environ.get("GKR_CONFIG")
    return Path(own) if own else Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gkr"


def known_names() -> list[str]:
    """Names for completion, from file names alone."""
    return sorted(path.stem for path in (config_folder() / "facts").glob("*.json"))


def read_registry() -> Registry:
    """What has been added; empty if nothing has."""
    path = config_folder() / _FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Registry({})
    except (OSError, UnicodeDecodeError) as error:
        hint = "check it; GKR_CONFIG=FOLDER names another place"
        raise ConfigError(f"the list of clusters cannot be read: {error}", where=str(path), hint=hint) from None
    import yaml

    try:
        found = cast("dict[str, Any]", yaml.safe_load(text) or {})
        entries = {
            name: ClusterEntry(
                name, str(one["kubeconfig"]), str(one["context"]), namespace=str(one.get("namespace") or "")
            )
            for name, one in cast("dict[str, dict[str, Any]]", found.get("clusters") or {}).items()
        }
        return Registry(entries, default=str(found.get("default") or ""))
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"this is no list of clusters: {' '.join(str(error).split())}",
            where=str(path),
            hint="mend it, or remove it and `gkr clusters add` them again",
        ) from None


def add_entry(entry: ClusterEntry, *, facts: ClusterFacts, replace: bool = False) -> Registry:
    """Record a cluster and its facts. The default stays: adding one must not change where files are launched."""
    registry = read_registry()
    present = registry.entries.get(entry.name)
    if present is not None and present != entry and not replace:
        raise RefusedError(
            f'"{entry.name}" is context {present.context} of {present.kubeconfig} already',
            hint="add --replace, or take another name",
        )
    _write_facts(entry.name, facts)
    return _write(Registry({**registry.entries, entry.name: entry}, default=registry.default))


def use_entry(name: str) -> Registry:
    """Make it the default; an empty name means that this machine is the default again."""
    registry = read_registry()
    if name:
        registry.get(name)
    return _write(Registry(registry.entries, default=name))


def remove_entry(name: str) -> Registry:
    """Forget it; its runs are not touched."""
    registry = read_registry()
    registry.get(name)
    (config_folder() / "facts" / f"{name}.json").unlink(missing_ok=True)
    rest = {key: one for key, one in registry.entries.items() if key != name}
    return _write(Registry(rest, default="" if registry.default == name else registry.default))


def cached_facts(entry: ClusterEntry) -> ClusterFacts:
    """The facts as they were when last read, with the entry's name and namespace."""
    from spec.facts import ClusterFacts

    path = config_folder() / "facts" / f"{entry.name}.json"
    try:
        facts = ClusterFacts.read_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        raise ConfigError(
            f"the facts of cluster {entry.name} are not here", where=str(path), hint=_again(entry)
        ) from None
    return localised(facts, entry)


def save_facts(entry: ClusterEntry, facts: ClusterFacts) -> None:
    """Keep what was read just now."""
    _write_facts(entry.name, facts)


def localised(facts: ClusterFacts, entry: ClusterEntry) -> ClusterFacts:
    """Facts under the name a person gave the cluster, and in the namespace that was asked for."""
    namespaces: Sequence[str] = [entry.namespace] if entry.namespace else facts.namespaces
    return facts.model_copy(update={"name": entry.name, "namespaces": list(namespaces)})


def _again(entry: ClusterEntry) -> str:
    place = f"--kubeconfig {entry.kubeconfig} --context {entry.context}"
    return f"`gkr clusters add {entry.name} {place} --replace` reads them again"


def _write_facts(name: str, facts: ClusterFacts) -> None:
    _write_text(config_folder() / "facts" / f"{name}.json", facts.model_dump_json(indent=1) + "\n")


def _write(registry: Registry) -> Registry:
    import yaml

    entries = {name: _fields(one) for name, one in sorted(registry.entries.items())}
    document = {"version": 1, "default": registry.default, "clusters": entries}
    _write_text(config_folder() / _FILE, yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    return registry


def _fields(entry: ClusterEntry) -> dict[str, str]:
    return {key: value for key, value in asdict(entry).items() if key != "name" and value}


def _write_text(path: Path, text: str) -> None:
    from gkr.local.files import write_atomically

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise RefusedError(
            f"cannot write {path}: {error.strerror or error}", hint="GKR_CONFIG=FOLDER names another place"
        ) from error


def entry_json(entry: ClusterEntry) -> str:
    """For the folder of a run, which must know its clusters even when the registry has changed."""
    return json.dumps(asdict(entry))
