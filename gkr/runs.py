"""Run folders: where they lie, how a person names one, and whether a run is alive.

Light on purpose (no pydantic): completion imports this on every press of TAB. It only reads; `gkr.local.launcher` makes
folders.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, EXIT_UNFINISHED, NotFoundError

FINAL = frozenset({"succeeded", "failed", "cancelled"})
"""States after which nothing of the run is alive."""
OVER = FINAL | {"lost"}
"""States in which nothing of the run is alive; a lost one may be resumed."""

LATEST = "latest"
"""The link to the newest run, beside the folders of experiments."""

START_SECONDS = 60.0
"""Within this after its plan was written a run has a supervisor, or never will."""

_FATES = {"succeeded": EXIT_OK, "failed": EXIT_FAILED, "cancelled": EXIT_CANCELLED}


@dataclass(frozen=True)
class Run:
    """One launch of an experiment, as its folder shows it."""

    experiment: str
    name: str
    path: Path
    created: float
    """Seconds since 1970 at which its plan was written."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands. `lost`: its supervisor is gone and nobody wrote how it ended."""

    status: str
    reason: str = ""
    exit_code: int = EXIT_UNFINISHED
    started: float = 0.0
    changed: float = 0.0


def runs_root() -> Path:
    """The folder that holds all runs."""
    return Path(os.environ.get("GKR_RUNS") or "runs")


def list_runs(root: Path | None = None) -> list[Run]:
    """All runs, newest first; a folder without a plan is not a run."""
    found: list[Run] = []
    for plan in (root or runs_root()).glob("*/*/plan.json"):
        folder = plan.parent
        if folder.parent.is_symlink():
            continue  # `latest` is a link to a run, not an experiment
        try:
            created = plan.stat().st_mtime_ns / 1e9
        except FileNotFoundError:
            continue  # removed while we looked
        found.append(Run(experiment=folder.parent.name, name=folder.name, path=folder, created=created))
    return sorted(found, key=lambda run: run.created, reverse=True)


def find_run(reference: str | None, *, root: Path | None = None) -> Run:
    """The run meant by an id, a unique start of it, its last part, an experiment's name, a folder, `-` or nothing."""
    root = root or runs_root()
    runs = list_runs(root)
    if not runs:
        raise NotFoundError(
            f"there are no runs in {root}", hint="`gkr launch FILE` starts one; GKR_RUNS names another folder"
        )
    if reference is None or reference == "-":
        return runs[0]
    exact = [run for run in runs if reference in {run.name, f"{run.experiment}/{run.name}", run.experiment}]
    if exact:
        return exact[0]
    folder = Path(reference).resolve() if "/" in reference else None
    near = [
        run
        for run in runs
        if run.name.startswith(reference) or run.name.endswith(f"-{reference}") or run.path.resolve() == folder
    ]
    if len(near) == 1:
        return near[0]
    if near:
        names = ", ".join(run.name for run in near[:5])
        raise NotFoundError(f'"{reference}" is the start of {len(near)} runs: {names}', hint="write one more letter")
    raise NotFoundError(f'there is no run "{reference}" in {root}', hint=_near_hint(reference, runs=runs))


def _near_hint(reference: str, *, runs: Sequence[Run]) -> str:
    import difflib  # only on this path: it is half of the cost of importing this module

    names = {run.name for run in runs} | {run.experiment for run in runs}
    near = difflib.get_close_matches(reference, names, n=1)
    return f'did you mean "{near[0]}"? `gkr ps` lists all' if near else "`gkr ps` lists all runs"


def read_state(path: Path) -> RunState:
    """The state in the last RunStatus event, corrected by whether its supervisor lives.

    A run on clusters has no supervisor: its state is as it was when somebody last looked.
    """
    first, last = 0.0, cast("dict[str, Any]", {})
    for line in _status_lines(path / "events.jsonl"):
        first = first or float(line.get("time", 0.0))
        last = line
    status = str(last.get("status", "starting"))
    changed = float(last.get("time", 0.0))
    if status in FINAL:
        code = last.get("exit_code")
        exit_code = code if isinstance(code, int) else _FATES[status]
        return RunState(status, str(last.get("reason", "")), exit_code, first, changed)
    if is_on_clusters(path):
        return RunState(status, str(last.get("reason", "")), EXIT_UNFINISHED, first, changed)
    begun = bool(last) or (path / "state" / "supervisor.json").exists()
    overdue = _written(path / "plan.json") + START_SECONDS < time.time()
    if supervisor_pid(path) is None and (begun or overdue):
        reason = "its supervisor is gone and did not say how the run ended; its processes ended with it"
        reason = reason if begun else "its supervisor never started"
        return RunState("lost", reason, EXIT_FAILED, first, max(changed, _written(path / "events.jsonl")))
    return RunState(status, str(last.get("reason", "")), EXIT_UNFINISHED, first, changed)


def is_on_clusters(path: Path) -> bool:
    """True of a run that was launched on a Kubernetes cluster."""
    return (path / "state" / "cluster.json").exists()


def supervisor_pid(path: Path) -> int | None:
    """The process that owns the run, if it is alive and not another process with a reused id."""
    try:
        fields = json.loads((path / "state" / "supervisor.json").read_text())
        pid, birth = int(fields["pid"]), str(fields["birth"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if process_birth(pid) == birth else None


def process_birth(pid: int) -> str | None:
    """A text that tells a process from any later one with the same id; none if it is dead or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _portable_birth(pid)
    except ProcessLookupError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[19]


def _portable_birth(pid: int) -> str | None:
    import psutil  # only on systems without /proc

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(round(process.create_time()))
    except psutil.Error:
        return None


def _written(path: Path) -> float:
    """When a file was written to last: the last sign of life of a run that could not say how it ended."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _status_lines(events: Path) -> list[dict[str, Any]]:
    try:
        text = events.read_bytes()
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        if b'"run_status"' not in line:
            continue  # cheap filter: a run has a handful of these among tens of thousands of lines
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # a torn line of a killed writer
        if isinstance(fields, dict) and "kind" in fields and fields["kind"] == "run_status":
            found.append(cast("dict[str, Any]", fields))
    return found
