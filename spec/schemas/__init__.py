"""JSON Schemas of every document: `python -m spec.schemas` writes them, `--check` says which are not current.

For editors and for readers in other languages; our own code reads with the models. The JSON files beside this module
are its output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spec.events import Event
from spec.experiment import Experiment
from spec.facts import ClusterFacts
from spec.plan import Plan
from spec.services import Directory
from spec.shards import Manifest
from spec.stack import StackConfig
from spec.summary import Summary
from spec.train import TrainConfig

FOLDER = Path(__file__).parent
DOCUMENTS: Mapping[str, tuple[Any, str]] = {
    "experiment": (Experiment, "An experiment file"),
    "train-recipe": (TrainConfig, "A training recipe in recipes/train/"),
    "cluster-facts": (ClusterFacts, "Facts of one cluster"),
    "plan": (Plan, "A resolved experiment, plan.json"),
    "event": (Event, "One line of events.jsonl"),
    "summary": (Summary, "summary.json"),
    "dataset-manifest": (Manifest, "The manifest of a dataset"),
    "stack": (StackConfig, "A stack's configuration, below gkr:stack in stacks/Pulumi.<stack>.yaml"),
    "service-directory": (Directory, "Where the services of one learner answer"),
}


def render(name: str) -> str:
    """The schema's text, stable from run to run."""
    kind, title = DOCUMENTS[name]
    schema = TypeAdapter(kind).json_schema(mode="validation")
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}
    return json.dumps(schema, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def stale(folder: Path = FOLDER) -> list[str]:
    """Files that are missing, differ from what would be written, or belong to no document."""
    found = [
        f"{name}.json"
        for name in DOCUMENTS
        if not (path := folder / f"{name}.json").is_file() or path.read_text(encoding="utf-8") != render(name)
    ]
    return found + sorted(path.name for path in folder.glob("*.json") if path.stem not in DOCUMENTS)


def write(folder: Path = FOLDER) -> list[str]:
    """Writes what is not current and removes what belongs to no document; the names of what changed."""
    changed = stale(folder)
    for file in changed:
        if Path(file).stem in DOCUMENTS:
            (folder / file).write_text(render(Path(file).stem), encoding="utf-8")
        else:
            (folder / file).unlink()
    return changed
