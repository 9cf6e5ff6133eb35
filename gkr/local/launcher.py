"""From a plan to a run that lives on its own.

The folder, the plan in it, the link `latest`, the supervisor in its own session.
"""

from __future__ import annotations

import contextlib
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
from gkr.local.journal import Journal
from gkr.runs import LATEST, START_SECONDS, Run, read_state, supervisor_pid
from spec.errors import EXIT_CANCELLED, GkrError, NotFoundError, RefusedError
from spec.events import RunStatus
from spec.plan import Plan

_FOLDERS = ("checkpoints", "sync", "samples", "logs", "state")
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
        link_atomically(root / LATEST, Path(plan.experiment) / plan.run)
    except OSError as error:
        if made:  # half a run would be in the way of everything that lists runs
            shutil.rmtree(folder, ignore_errors=True)
        raise _cannot_write(error, folder) from error
    return Run(experiment=plan.experiment, name=plan.run, path=folder, created=time.time())


def start_supervisor(run: Run) -> int:
    """Start the run's supervisor detached from this terminal and wait until it owns the run; its process id.

    Where this fails or is interrupted, nothing of it is left alive.
    """
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
    try:
        _wait_until_it_owns(run, process, log=log)
    except BaseException:  # Ctrl-C too: nobody has been told of the run yet
        process.kill()
        process.wait(timeout=10)
        raise
    return process.pid


def _wait_until_it_owns(run: Run, process: subprocess.Popen[bytes], *, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if supervisor_pid(run.path) == process.pid:
            return
        if process.poll() is not None:
            raise GkrError(f"the supervisor of {run.name} ended at once: {last_line(log)}", hint=f"all of it: {log}")
        time.sleep(_POLL_SECONDS)
    raise GkrError(
        f"the supervisor of {run.name} did not start within {START_SECONDS:g} s", hint=f"what it wrote: {log}"
    )


def withdraw_run(run: Run) -> None:
    """Write that the run was cancelled before anybody heard of it; its supervisor must be gone."""
    journal = Journal(run.path)
    reason = "interrupted while it was started"
    journal.append(RunStatus(time=0.0, source="gkr", status="cancelled", reason=reason, exit_code=EXIT_CANCELLED))
    journal.close()


def cancel_run(run: Run, *, now: bool, timeout_seconds: float) -> str:
    """Ask the run's supervisor to end it and wait for that; the state it ended in.

    A supervisor that is only about to own the run finds the request when it does.
    """
    pid = supervisor_pid(run.path)
    if pid is None and read_state(run.path).status != "starting":
        return read_state(run.path).status
    write_atomically(run.path / "state" / "cancel", json.dumps({"now": now}))
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if supervisor_pid(run.path) is None and (status := read_state(run.path).status) != "starting":
            return status
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
