"""From a plan to a run that lives on its own.

The folder, the plan in it, the link `latest`, the supervisor in its own session.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from gkr.local.children import last_line
from gkr.local.files import link_atomically, write_atomically
from gkr.runs import Run, read_state, supervisor_pid
from spec.errors import GkrError, NotFoundError, RefusedError
from spec.plan import Plan

_FOLDERS = ("checkpoints", "sync", "samples", "logs", "state")
_START_SECONDS = 60.0
_POLL_SECONDS = 0.02


def create_run(plan: Plan, *, root: Path) -> Run:
    """The run's folder with its plan, not started yet."""
    folder = (root / plan.experiment / plan.run).absolute()
    made = False
    try:
        folder.mkdir(parents=True)
        made = True
        for name in _FOLDERS:
            (folder / name).mkdir()
        write_atomically(folder / "plan.json", plan.model_dump_json(indent=1))
        link_atomically(root / "latest", Path(plan.experiment) / plan.run)
    except OSError as error:
        if made:  # half a run would be in the way of everything that lists runs
            shutil.rmtree(folder, ignore_errors=True)
        raise _cannot_write(error, folder) from error
    return Run(experiment=plan.experiment, name=plan.run, path=folder, created=time.time())


def start_supervisor(run: Run) -> int:
    """Start the run's supervisor detached from this terminal and wait until it owns the run; its process id."""
    log = _next_log(run.path)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "gkr.local.supervisor", f"{run.path}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise _cannot_write(error, run.path) from error
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if supervisor_pid(run.path) == process.pid:
            return process.pid
        if process.poll() is not None:
            raise GkrError(f"the supervisor of {run.name} ended at once: {last_line(log)}", hint=f"all of it: {log}")
        time.sleep(_POLL_SECONDS)
    process.kill()
    process.wait(timeout=10)
    raise GkrError(
        f"the supervisor of {run.name} did not start within {_START_SECONDS:g} s", hint=f"what it wrote: {log}"
    )


def cancel_run(run: Run, *, now: bool, timeout_seconds: float) -> str:
    """Ask the run's supervisor to end it and wait for that; the state it ended in."""
    pid = supervisor_pid(run.path)
    if pid is None:
        return read_state(run.path).status
    write_atomically(run.path / "state" / "cancel", json.dumps({"now": now}))
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return read_state(run.path).status
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if supervisor_pid(run.path) is None:
            return read_state(run.path).status
        time.sleep(_POLL_SECONDS)
    raise GkrError(
        f"run {run.name} has not ended {timeout_seconds:g} s after it was asked to",
        hint=f"`gkr cancel {run.name} --now` kills it",
    )


def resume_run(run: Run) -> int:
    """Give a run whose supervisor is gone a new one; attempts are counted on, checkpoints are kept."""
    state = read_state(run.path)
    if state.status not in {"lost", "starting"} or supervisor_pid(run.path) is not None:
        raise RefusedError(
            f"run {run.name} is {state.status}; only a lost run can be resumed",
            hint="`gkr launch FILE` starts a new run",
        )
    if not (run.path / "plan.json").exists():
        raise NotFoundError(f"run {run.name} has no plan.json", where=f"{run.path}")
    (run.path / "state" / "cancel").unlink(missing_ok=True)
    return start_supervisor(run)


def _next_log(folder: Path) -> Path:
    attempt = 1
    while (folder / "logs" / "run" / f"{attempt}" / "supervisor-0.log").exists():
        attempt += 1
    return folder / "logs" / "run" / f"{attempt}" / "supervisor-0.log"


def _cannot_write(error: OSError, folder: Path) -> GkrError:
    hint = "GKR_RUNS=FOLDER names another place for runs"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return RefusedError(f"no space left for the run's folder {folder}", hint=f"free some space, or {hint}")
    if isinstance(error, FileExistsError):
        return RefusedError(
            f"{error.filename or folder} exists already", hint="launch again, or remove it if it is in the way"
        )
    return RefusedError(f"cannot write the run's folder {folder}: {error.strerror or error}", hint=hint)
