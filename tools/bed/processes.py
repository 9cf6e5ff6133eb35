"""The bed's components: started detached, found again by what the kernel says of them, ended for certain.

A component carries its name and a digest of its command and files in its environment. So a second `up` knows what runs
as it should, what runs otherwise and what is missing, whoever started it and however that one ended.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spec.errors import UnreachableError
from tools.bed import groups
from tools.bed.holder import POLL_SECONDS, Process, clean_environment, environment_of, log_end, members, send
from tools.bed.layout import Bed
from tools.bed.run import CommandError, enter, inside

MARK = "GKR_BED_COMPONENT"
STOP_SECONDS = 5.0
"""The API server drains watches for up to a minute; killing it after this lost nothing."""


@dataclass(frozen=True)
class Component:
    """A long-lived process of the bed. Its name is also the name of its log."""

    name: str
    command: tuple[str, ...]
    ready: Callable[[], str]
    """Empty when it does its work, else what is missing. May raise what `run` raises: that counts as missing."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: tuple[Path, ...] = ()
    """Files that it reads only at its start: other content starts it again."""
    deadline_seconds: float = 120.0

    @property
    def mark(self) -> str:
        """Name and digest of all that decided the process."""
        parts = [*self.command, *(f"{key}={value}" for key, value in sorted(self.environment.items()))]
        digest = hashlib.sha256("\0".join(parts).encode())
        for path in self.inputs:
            digest.update(path.read_bytes())
        return f"{self.name}:{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class Running:
    """A component that was found alive."""

    name: str
    mark: str
    process: Process


def ensure(bed: Bed, component: Component) -> Process:
    """Start the component unless it runs as described already, and return when it is ready."""
    process = start(bed, component)
    wait_ready(bed, component, process)
    return process


def start(bed: Bed, component: Component) -> Process:
    """Start the component unless it runs as described already; one that runs otherwise is stopped first."""
    found = running(bed).get(component.name)
    if found is not None and found.mark == component.mark:
        return found.process
    if found is not None:
        stop(found.process)
    log = bed.log(component.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))  # why it ended may stand there
    # The shell is a child of nsenter inside; it leaves the component behind, which process 1 of the bed inherits.
    script = 'log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null & echo $!'
    command = [*enter(bed), "/bin/sh", "-c", script, "sh", f"{log}", *component.command]
    environment = {**clean_environment(), **component.environment, MARK: component.mark}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode:
        raise UnreachableError(f"{component.name} cannot be started: {done.stderr.strip()}")
    process = _await_start(bed, component, inner=int(done.stdout))
    groups.join(bed, [process.pid])
    return process


def _await_start(bed: Bed, component: Component, *, inner: int) -> Process:
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for process, numbers in members(bed):
            if numbers[1:] == [inner]:
                return process
        time.sleep(POLL_SECONDS)
    raise UnreachableError(f"{component.name} ended at once{log_end(bed, component.name)}")


def wait_ready(bed: Bed, component: Component, process: Process) -> None:
    """Return when the component is ready; an error names what is missing and ends with its last log lines."""
    deadline = time.monotonic() + component.deadline_seconds
    missing = "not asked yet"
    while time.monotonic() < deadline:
        if not process.alive:
            raise UnreachableError(f"{component.name} of {bed.name} ended{log_end(bed, component.name)}")
        try:
            missing = component.ready()
        except (CommandError, UnreachableError) as error:
            missing = error.message
        if not missing:
            return
        time.sleep(POLL_SECONDS)
    raise UnreachableError(
        f"{component.name} of {bed.name} is not ready after {component.deadline_seconds:g} s: {missing}"
        f"{log_end(bed, component.name)}"
    )


def stop(process: Process, *, grace_seconds: float = STOP_SECONDS) -> None:
    """SIGTERM, then SIGKILL, to that process and no later one with its id."""
    for number, patience in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 10.0)):
        if not send(process, number):
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not process.alive:
                return
            time.sleep(POLL_SECONDS)
    raise UnreachableError(f"process {process.pid} does not end although it was killed")


def running(bed: Bed) -> dict[str, Running]:
    """Components that are alive."""
    found: dict[str, Running] = {}
    for process, numbers in members(bed):
        # What a component started may inherit its environment; the component itself is the eldest and leads a session.
        mark = environment_of(process.pid).get(MARK)
        if not mark or len(numbers) != 2 or not _session_leader(process.pid):
            continue
        name = mark.partition(":")[0]
        if name not in found or int(process.birth) < int(found[name].process.birth):
            found[name] = Running(name=name, mark=mark, process=process)
    return found


def _session_leader(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def probe(bed: Bed, url: str) -> str:
    """Whether a health endpoint inside the bed answers."""
    inside(bed, ["wget", "-q", "-O", "-", "-T", "2", "-t", "1", "--no-check-certificate", url], deadline_seconds=10)
    return ""
