"""All runs a person can see: folders here, and what the clusters have, as one list.

Writes nothing. Light: neither pydantic nor, without a cluster, lightkube.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gkr.runs import FINAL, OVER, Run, RunState, is_on_clusters, list_runs, read_state
from gkr.watch.text import short_duration, shortened

if TYPE_CHECKING:
    from gkr.cluster.survey import Found
    from spec.errors import GkrError

_WIDEST_REASON = 80


@dataclass(frozen=True)
class Row:
    """One run."""

    run: str
    experiment: str
    where: str
    """`local`, or its clusters."""
    state: RunState
    created: float
    path: str = ""
    """Empty if it has no folder here."""

    def fields(self) -> dict[str, object]:
        """For -o json."""
        state = {"status": self.state.status, "reason": self.state.reason, "exit_code": self.state.exit_code}
        place = {"where": self.where, "created": self.created, "path": self.path}
        return {"run": self.run, "experiment": self.experiment, **state, **place}

    def cells(self) -> list[str]:
        """For a table."""
        now = time.time()
        took = ""
        if self.state.started:
            end = self.state.changed if self.state.status in OVER else now
            took = short_duration(end - self.state.started)
        age, reason = short_duration(now - self.created), shortened(self.state.reason, width=_WIDEST_REASON)
        return [self.run, self.experiment, self.where, self.state.status, took, age, reason]


@dataclass(frozen=True)
class Listing:
    """Rows, newest first, and the clusters that did not answer."""

    rows: Sequence[Row]
    failed: Sequence[GkrError] = ()


def list_everywhere(*, ask: bool) -> Listing:
    """Runs with a folder here, corrected by their clusters, and those that only the clusters know."""
    runs = list_runs()
    rows = [_row(run) for run in runs]
    found, failed = _ask() if ask else ({}, [])
    merged = [_corrected(row, found.get(row.run, [])) for row in rows]
    here = {row.run for row in rows}
    merged += [_foreign(jobs) for run, jobs in found.items() if run not in here]
    return Listing(sorted(merged, key=lambda row: row.created, reverse=True), failed)


def _row(run: Run) -> Row:
    where = "local"
    if is_on_clusters(run.path):
        from gkr.cluster.places import read_places

        where = ",".join(read_places(run.path).clusters)
    try:
        state = read_state(run.path)
    except OSError as error:  # another person's, or damaged: the others are shown all the same
        state = RunState("unreadable", f"{error.filename}: {error.strerror}")
    return Row(run.name, run.experiment, where, state, run.created, f"{run.path}")


def _ask() -> tuple[dict[str, list[Found]], list[GkrError]]:
    from gkr.cluster.registry import config_folder

    if not (config_folder() / "clusters.yaml").exists():
        return {}, []
    from gkr.cluster.registry import read_registry
    from gkr.cluster.survey import survey

    registry = read_registry()
    if not registry.entries:
        return {}, []
    found, failed = survey(registry)
    by_run: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        by_run[one.run].append(one)
    return by_run, list(failed.values())


def _corrected(row: Row, found: Sequence[Found]) -> Row:
    """A folder that nobody refreshed may lag behind; a final state stays."""
    if row.state.status in FINAL or not found:
        return row
    return replace(row, state=_state(found, started=row.state.started, changed=row.state.changed))


def _foreign(found: Sequence[Found]) -> Row:
    created = _seconds(min(one.created for one in found))
    where = ",".join(one.entry.name for one in found)
    return Row(found[0].run, found[0].experiment, where, _state(found, started=created, changed=0.0), created)


def _state(found: Sequence[Found], *, started: float, changed: float) -> RunState:
    from gkr.cluster.state import standing

    states = {learner: state for one in found for learner, state in one.states.items()}
    now = standing(states)
    return RunState(now.status, now.reason, now.exit_code, started, _ended(found) or changed)


def _ended(found: Sequence[Found]) -> float:
    from gkr.cluster.fields import text

    times = [text(job, "status", "endTime") for one in found for job in one.jobs]
    return max((_seconds(one) for one in times if one), default=0.0)


def _seconds(text: str) -> float:
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
