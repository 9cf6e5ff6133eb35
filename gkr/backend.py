"""What every backend does with a run, and which backend has one.

The local backend and the clusters are two implementations of this interface; commands know no other. A run's folder is
the same on both: plan.json, events.jsonl, logs/, summary.json, report.html. Light on purpose: the implementations are
imported when one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gkr.runs import Run, is_on_clusters, list_runs
from gkr.runs import find_run as find_folder
from spec.errors import NotFoundError

if TYPE_CHECKING:
    from spec.plan import Plan

Say = Callable[[str], None]


class Attachment(Protocol):
    """A look at one run that keeps its folder current."""

    poll_seconds: float
    """How often it makes sense to look."""

    def refresh(self) -> bool:
        """Bring events and state into the folder; false when nothing more will come."""
        ...

    def fetch(self) -> None:
        """Bring events, logs and pictures into the folder, also of a run that has ended."""
        ...

    def logs(self) -> None:
        """Bring only the logs."""
        ...

    def finish(self) -> None:
        """Once the run has ended: make sure that summary and report are there."""
        ...

    def close(self) -> None:
        """Give its connections back; the run goes on."""
        ...


class Backend(Protocol):
    """Where runs live."""

    name: str

    def check(self, plan: Plan, *, say: Say) -> None:
        """Everything that would refuse the plan, asked without creating anything."""
        ...

    def launch(self, plan: Plan, *, root: Path, say: Say) -> Run:
        """Start it; the run goes on without us."""
        ...

    def attach(self, run: Run) -> Attachment:
        """Look at a run."""
        ...

    def cancel(self, run: Run, *, now: bool, timeout_seconds: float) -> str:
        """End it and wait until nothing of it is alive; the state it ended in."""
        ...

    def resume(self, run: Run) -> None:
        """Go on with a run that lost its owner."""
        ...

    def ask_syncer(self, run: Run, *, path: str) -> bytes:
        """What the run's syncer answers on its control port; UnreachableError or RefusedError if it does not."""
        ...


def backend_of(run: Run) -> Backend:
    """The backend that has a run."""
    return _clusters() if is_on_clusters(run.path) else _local()


def backend_for(plan: Plan) -> Backend:
    """The backend that would carry out a plan."""
    return _clusters() if plan.backend == "kubernetes" else _local()


def find_run(reference: str | None) -> Run:
    """The run that a person means: one with a folder here, else one found in the clusters that were added."""
    from gkr.cluster.registry import config_folder

    try:
        return find_folder(reference)
    except NotFoundError:
        if reference in {None, "-"} and list_runs():
            raise
        if not (config_folder() / "clusters.yaml").exists():
            raise
        from gkr.cluster.adopt import adopt

        found = adopt(reference)
        if found is None:
            raise
        return found


def refresh(run: Run, *, everything: bool = False) -> None:
    """One look: the folder as it is now, with logs and pictures if `everything`."""
    with closing(backend_of(run).attach(run)) as attachment:
        attachment.refresh()
        if everything:
            attachment.fetch()


def _local() -> Backend:
    from gkr.local.backend import LocalBackend

    return LocalBackend()


def _clusters() -> Backend:
    from gkr.cluster.backend import ClusterBackend

    return ClusterBackend()
