"""What a driver is told: by its command line on the local backend, by the environment of its pod on a cluster.

With `--events` somebody else owns the run's events and its attempts (the supervisor of the local backend). Without it
this driver keeps its own events, hands them to the run's bucket, and finds in there what the drivers before it did.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All of it."""

    plan: Path
    learner: str
    run_dir: Path
    events: Path | None
    """File of the whole run's events; none: this driver keeps and ships its own."""
    syncer_control: str
    """host:port; empty: the plan's."""
    syncer_bulk: str
    attempt: int
    """Which start of this driver; 0: follows from the events of the drivers before it."""

    @property
    def log_dir(self) -> Path:
        """Logs of this start."""
        return self.run_dir / self.log_folder

    @property
    def log_folder(self) -> str:
        """Logs of this start, relative to the run's folder of any node."""
        return log_folder(self.learner, attempt=self.attempt)


def log_folder(learner: str, *, attempt: int) -> str:
    """Where the logs of an attempt lie, relative to the run's folder."""
    return f"logs/{learner}/{attempt}"


def node_folder(learner: str, *, node: str) -> str:
    """A node's own folder, relative to the run's folder."""
    return f"state/nodes/{learner}/{node}"


def parse(arguments: list[str] | None = None, *, environment: Mapping[str, str] = os.environ) -> Options:
    """The command line, completed from the environment."""
    parser = argparse.ArgumentParser(prog="python -m training.driver", description="Drives one learner of a run.")
    parser.add_argument("--plan", type=Path, help="plan.json of the run (default: GKR_PLAN)")
    parser.add_argument("--learner", help="name of the learner (default: GKR_LEARNER)")
    parser.add_argument("--run-dir", type=Path, help="folder of the run on this machine (default: GKR_RUN_DIR)")
    parser.add_argument("--events", type=Path, help="the run's events (default: an own file, shipped to the bucket)")
    parser.add_argument("--syncer-control", default="", help="host:port (default: the plan's)")
    parser.add_argument("--syncer-bulk", default="", help="host:port (default: the plan's)")
    parser.add_argument("--attempt", type=int, default=0, help="which start of this driver (default: by the events)")
    given = parser.parse_args(arguments)
    plan: str = given.plan or environment.get("GKR_PLAN", "")
    learner: str = given.learner or environment.get("GKR_LEARNER", "")
    run_dir: str = given.run_dir or environment.get("GKR_RUN_DIR", "")
    missing = [name for name, value in (("plan", plan), ("learner", learner), ("run-dir", run_dir)) if not value]
    if missing:
        raise ConfigError(
            f"not told {', '.join(missing)}",
            hint="drivers are started by `gkr launch`; to run one by hand, give the options or set GKR_PLAN, "
            "GKR_LEARNER and GKR_RUN_DIR",
        )
    return Options(
        plan=Path(plan),
        learner=learner,
        run_dir=Path(run_dir),
        events=given.events,
        syncer_control=given.syncer_control,
        syncer_bulk=given.syncer_bulk,
        attempt=given.attempt,
    )
