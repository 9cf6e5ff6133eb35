"""In which clusters a run is: written into its folder when it is launched, read by everything that acts on it.

Light on purpose: `gkr ps` reads one for every run. The record, not the registry, decides where a cancel goes, so that a
changed context, a renamed entry or another `clusters use` never sends it elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gkr.cluster.registry import ClusterEntry
from spec.errors import RefusedError


@dataclass(frozen=True)
class LearnerPlace:
    """One learner's job."""

    learner: str
    cluster: str
    namespace: str
    job: str


@dataclass(frozen=True)
class Places:
    """Where a run is."""

    experiment: str
    run: str
    learners: tuple[LearnerPlace, ...]
    clusters: Mapping[str, ClusterEntry]
    syncer: LearnerPlace | None = None
    """Its job is a batch Job; its learner is empty."""

    def all(self) -> list[LearnerPlace]:
        """Learners, then the syncer."""
        return [*self.learners, *([self.syncer] if self.syncer else [])]

    def namespaces(self) -> list[tuple[str, str]]:
        """Every pair of cluster and namespace, once."""
        return list(dict.fromkeys((one.cluster, one.namespace) for one in self.all()))


def places_file(folder: Path) -> Path:
    """Its presence makes a run a cluster's."""
    return folder / "state" / "cluster.json"


def write_places(folder: Path, places: Places) -> None:
    """Keep it with the run."""
    from gkr.local.files import write_atomically

    write_atomically(places_file(folder), json.dumps({"version": 1, **asdict(places)}, indent=1))


def read_places(folder: Path) -> Places:
    """Of a run that has one; RefusedError if it cannot be read."""
    path = places_file(folder)
    try:
        found = json.loads(path.read_text())
        return Places(
            experiment=found["experiment"],
            run=found["run"],
            learners=tuple(LearnerPlace(**one) for one in found["learners"]),
            clusters={name: ClusterEntry(**one) for name, one in found["clusters"].items()},
            syncer=LearnerPlace(**found["syncer"]) if found.get("syncer") else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"cannot tell in which clusters this run is: {error}",
            where=str(path),
            hint="remove the run's folder; `gkr ps` then finds the run in its cluster",
        ) from None
