"""Child processes of the supervisor: started, watched and ended by process id, never by name.

Each child leads a session of its own and gets SIGKILL from the kernel when the supervisor dies (Linux). When a child is
gone, what is left of its process group is killed before the child is reaped: until then the group's id cannot belong to
anybody else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Gone:
    """A child that ended. `code` is negative for a signal."""

    name: str
    code: int
    detected_seconds: float
    """At most this long between its death and our noticing: the time since it was last seen alive."""
    last_line: str


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    log: Path
    seen_alive: float


class Children:
    """The children by name; one process per name at a time."""

    def __init__(self, *, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._children: dict[str, _Child] = {}

    def start(
        self,
        name: str,
        *,
        command: Sequence[str],
        log: Path,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start one child with both outputs appended to `log`; its process id. It inherits `descriptors`, and has
        `environment` of its own beside the common one.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environment, **(environment or {})},
                start_new_session=True,
                pass_fds=tuple(descriptors),
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self._children[name] = _Child(process, log, time.monotonic())
        return process.pid

    def pid(self, name: str) -> int | None:
        """Its process id while it runs."""
        return self._children[name].process.pid if name in self._children else None

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the child itself; one that is gone needs none."""
        if name in self._children:
            # Not Popen.send_signal, which reaps: until `collect` has seen it, a dead child stays and its id stays ours.
            os.kill(self._children[name].process.pid, number)

    def kill(self, name: str) -> None:
        """SIGKILL to the child's whole process group."""
        if name in self._children:
            _kill_group(self._children[name].process.pid)

    def end(self, name: str) -> None:
        """Kill it with its group and reap it."""
        child = self._children.pop(name, None)
        if child is not None:
            _kill_group(child.process.pid)
            child.process.wait(timeout=5)

    def collect(self) -> list[Gone]:
        """Children that ended since the last call, reaped."""
        now = time.monotonic()
        gone: list[Gone] = []
        for name, child in list(self._children.items()):
            if not _has_ended(child.process.pid):
                child.seen_alive = now
                continue
            _kill_group(child.process.pid)
            code = child.process.wait(timeout=5)
            del self._children[name]
            gone.append(Gone(name, code, now - child.seen_alive, last_line(child.log)))
        return gone


def last_line(log: Path) -> str:
    """The last line with text in a log, for a one-line reason."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nothing left in it; macOS says EPERM for a group of zombies


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: no imports between fork and exec

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the call, so no signal will come

    return set_signal
