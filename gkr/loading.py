"""From a file a person wrote to a plan: reads the file, the recipes and this machine; `spec` does all the judging.

The only place in `gkr` that reads experiment files; every complaint about one comes out of here as ConfigError with its
place.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gkr.local.facts import this_machine
from gkr.runs import runs_root
from spec.document import Located
from spec.errors import ConfigError
from spec.experiment import Experiment
from spec.facts import ClusterFacts
from spec.load import load_experiment
from spec.names import run_id
from spec.nodes import Source
from spec.plan import Plan
from spec.resolve import resolve_located

_LARGEST_BYTES = 1 << 20
_FACTS: TypeAdapter[ClusterFacts | list[ClusterFacts]] = TypeAdapter(ClusterFacts | list[ClusterFacts])


def load_plan(file: Path, *, overrides: Sequence[str] = (), facts: Path | None = None) -> Plan:
    """The plan that launching this file now would carry out; nothing is written.

    Against this machine, or against the clusters whose facts are in a file.
    """
    document = load_file(file, overrides=overrides)
    run = run_id(datetime.now(UTC), random_hex=secrets.token_hex(4))
    folder = (runs_root() / document.value.name / run).absolute()
    clusters = load_facts(facts) if facts is not None else this_machine()
    local = all(cluster.backend == "local" for cluster in clusters)
    return resolve_located(document, clusters, run=run, env=os.environ, run_uri=folder.as_uri() if local else None)


def load_facts(file: Path) -> list[ClusterFacts]:
    """Facts of one cluster or a list of them, as deployed regions publish them; read leniently."""
    source = _read(file)
    try:
        found = _FACTS.validate_json(source.text, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"] if not isinstance(part, str) or "[" not in part)
        raise ConfigError(
            f"these are not the facts of a cluster: {path}: {first['msg']}",
            where=str(file),
            hint="take the output `facts` of the platform stack, described by spec/schemas/cluster-facts.json",
        ) from None
    return found if isinstance(found, list) else [found]


def load_file(file: Path, *, overrides: Sequence[str] = ()) -> Located[Experiment]:
    """The experiment in a file, with its recipe and the changes of the command line."""
    return load_experiment(_read(file), recipes=_recipes(file), overrides=overrides)


def _read(file: Path) -> Source:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}", hint=_other_files(file)) from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder", hint=_other_files(file / "x")) from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint="check its permissions") from None
    if len(data) > _LARGEST_BYTES:
        raise ConfigError(
            f"{file} has {len(data)} bytes; an experiment file has at most {_LARGEST_BYTES}",
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
