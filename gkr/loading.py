"""From a file a person wrote to a plan: reads the file, the recipes and what is known of the clusters; `spec` judges.

The only place in `gkr` that reads experiment files; every complaint about one comes out of here as ConfigError with its
place.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from gkr.local.facts import this_machine
from gkr.runs import LATEST, runs_root
from spec.document import Located
from spec.errors import ConfigError
from spec.experiment import ANY, Experiment
from spec.facts import ClusterFacts
from spec.load import load_experiment
from spec.names import run_id
from spec.nodes import Source
from spec.plan import Plan
from spec.problems import DocumentError
from spec.resolve import resolve_located

if TYPE_CHECKING:
    from gkr.cluster.registry import Registry

_LARGEST_BYTES = 1 << 20
_FACTS: TypeAdapter[ClusterFacts | list[ClusterFacts]] = TypeAdapter(ClusterFacts | list[ClusterFacts])


def load_plan(
    file: Path, *, overrides: Sequence[str] = (), facts: Path | None = None, clusters: Sequence[str] = ()
) -> Plan:
    """The plan that launching this file now would carry out; nothing is written, no cluster is asked.

    Against the named clusters, else those whose facts are in a file, else those that the file or `gkr clusters use`
    names, else this machine.
    """
    document = load_file(file, overrides=overrides)
    if document.value.name == LATEST:
        message = f'name: "{LATEST}" is reserved for the link to the newest run'
        raise DocumentError([document.problem(("name",), message, hint="choose another name")])
    run = run_id(datetime.now(UTC), random_hex=secrets.token_hex(4))
    folder = (runs_root() / document.value.name / run).absolute()
    if clusters:
        placed = [*overrides, *_placements(document.value, clusters)]
        document = load_file(file, overrides=placed)
    available = load_facts(facts) if facts is not None else _available(document.value, clusters)
    local = all(cluster.backend == "local" for cluster in available)
    return resolve_located(document, available, run=run, env=os.environ, run_uri=folder.as_uri() if local else None)


def load_current_plan(file: Path, *, overrides: Sequence[str] = (), clusters: Sequence[str] = ()) -> Plan:
    """The same, to be launched: on what its clusters publish now. What the known facts refuse is refused first."""
    plan = load_plan(file, overrides=overrides, clusters=clusters)
    if plan.backend == "local":
        return plan
    from gkr.cluster.joining import refresh_known

    changed = refresh_known(learner.cluster for learner in plan.learners)
    return load_plan(file, overrides=overrides, clusters=clusters) if changed else plan


def _placements(experiment: Experiment, clusters: Sequence[str]) -> list[str]:
    """`--cluster` as changes of the file: one name for every learner, several in turn."""
    if experiment.learners is None:
        return [f"cluster={clusters[0]}"]
    return [f"learners[{index}].cluster={clusters[index % len(clusters)]}" for index in range(len(experiment.learners))]


def _available(experiment: Experiment, clusters: Sequence[str]) -> list[ClusterFacts]:
    """What the file may be placed on. An experiment is on one backend, so it is either this machine or the clusters."""
    from gkr.cluster.registry import cached_facts, read_registry

    placed = [name for one in experiment.placed_learners() for name in one.config.cluster]
    named = [name for name in placed if name != ANY]
    here, registry = this_machine(), read_registry()
    local = {one.name for one in here}
    wanted = [name for name in dict.fromkeys(named) if name in registry.entries and name not in local]
    for name in clusters:
        if name not in local:
            registry.get(name)
    if wanted:  # the others, too: a list of clusters or `any` may name them
        return [cached_facts(registry.entries[name]) for name in [*wanted, *_others(registry, wanted)]]
    if registry.default and not local & set(named):
        order = [registry.default, *_others(registry, [registry.default])]
        return [cached_facts(registry.entries[name]) for name in order]
    return here


def _others(registry: Registry, first: Sequence[str]) -> list[str]:
    return [name for name in registry.entries if name not in first]


def load_facts(file: Path) -> list[ClusterFacts]:
    """Facts of one cluster or a list of them, as deployed regions publish them; read leniently."""
    source = _read(file)
    try:
        found = _FACTS.validate_json(source.text, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or "[" not in part)
        reason = f"{path}: {first['msg']}" if path else first["msg"]
        raise ConfigError(
            f"these are not the facts of a cluster: {reason}",
            where=str(file),
            hint="take the output `facts` of the platform stack, described by spec/schemas/cluster-facts.json",
        ) from None
    return found if isinstance(found, list) else [found]


def load_file(file: Path, *, overrides: Sequence[str] = ()) -> Located[Experiment]:
    """The experiment in a file, with its recipe and the changes of the command line."""
    return load_experiment(_read(file), recipes=_recipes(file), overrides=overrides)


def _read(file: Path) -> Source:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST_BYTES + 1)  # not more: a device has no end
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"there is no file {file}", hint=_other_files(file)) from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder", hint=_other_files(file / "x")) from None
    except PermissionError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint="check its permissions") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint="is it the right file?") from None
    if len(data) > _LARGEST_BYTES:
        raise ConfigError(
            f"{file} has more than {_LARGEST_BYTES} bytes, the most an experiment file may have",
            hint="is it the right file?",
        )
    try:
        return Source(data.decode("utf-8-sig"), f"{file}")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"byte {data[error.start]:#04x} is not UTF-8", where=f"{file}:{line}", hint="save the file as UTF-8"
        ) from None


def _other_files(file: Path) -> str:
    folder = file.parent
    names = sorted(str(one) for one in [*folder.glob("*.yaml"), *folder.glob("*.yml")]) if folder.is_dir() else []
    return f"files here: {', '.join(names[:6])}" if names else "`gkr init` writes a file to start from"


def _recipes(file: Path) -> dict[str, Source]:
    """Training presets by name.

    Those we ship, and those in recipes/train/ beside the file or the working directory, which win.
    """
    shipped = Path(__file__).resolve().parents[1] / "recipes" / "train"
    folders = [shipped, Path("recipes") / "train", file.parent / "train"]
    return {path.stem: _read(path) for folder in folders for path in sorted(folder.glob("*.yaml"))}
