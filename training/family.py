"""One child process and everything that descends from it: forwarded signals, reaped orphans, an end for all of them.

For the main process of a pod (the kernel gives it every orphan) and for the keeper of a person's command, which asks
the kernel for the same. Whoever makes a `Family` must start no other child in its process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

import psutil

from training.processes import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0


class Family:
    """The child leads a session of its own, so that a signal reaches what it runs in the foreground too."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: IO[bytes] | None = None,
        folder: str | None = None,
    ) -> None:  # fmt: skip
        adopt_orphans()
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=folder,
            start_new_session=True,
            preexec_fn=_start,
        )
        self.pid = self._child.pid
        self.code: int | None = None
        """How the child ended, by the convention of subprocess."""

    def reap(self) -> int | None:
        """Collect everything that has ended; the child's code once it has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self.code
            if pid == 0:
                return self.code
            if pid == self.pid:
                self.code = self._child.returncode = os.waitstatus_to_exitcode(status)

    def signal(self, number: int) -> None:
        """To the child and its session."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to all descendants, also those that left the session, until none is left."""
        until = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < until:
            self.reap()
            left = psutil.Process().children(recursive=True)
            if not left:
                return
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.01)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (Linux; process 1 is that already)."""
    if sys.platform != "linux" or os.getpid() == 1:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def shell_code(code: int) -> int:
    """The exit code with which a parent reports a child's end: 128 + n for signal n, as shells do."""
    return 128 - code if code < 0 else code


def _start() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    die_with_parent(signal.SIGKILL)
