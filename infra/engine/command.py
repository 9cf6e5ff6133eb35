"""The engine's binary as the Automation API calls it, with a deadline.

A run that takes too long, or whose caller is interrupted, is interrupted as a person would do it: the engine then ends
what it began, writes its state and gives up its lock. It has a session of its own, so that a terminal's interrupt
reaches it through us, once. Only an engine that does not react is killed, and what it started with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from pulumi.automation import CommandResult, PulumiCommand
from pulumi.automation.errors import create_command_error
from semver import VersionInfo

from spec.errors import UnreachableError

GRACE_SECONDS = 120.0
"""What the engine gets to end after an interrupt."""
ABORT_SECONDS = 20.0
"""And after a second one."""
READ_SECONDS = 10.0

Line = Callable[[str], object]


class Engine(PulumiCommand):
    """Runs the binary under `root`/bin; `seconds` is for each call."""

    def __init__(self, root: Path, *, seconds: float) -> None:
        super().__init__(root=str(root), skip_version_check=True)
        self._seconds = seconds
        if self.version is None:  # a binary built from source names none; the tools' pins keep it near the SDK
            self.version = VersionInfo.parse(version("pulumi"))

    def run(
        self,
        args: Sequence[str],
        cwd: str,
        additional_env: Mapping[str, str],
        on_output: Line | None = None,
        on_error: Line | None = None,
    ) -> CommandResult:
        """One command; UnreachableError if it did not end in time, CommandError if it failed."""
        command = [self.command, *args]
        if "--non-interactive" not in command:
            command.append("--non-interactive")
        with _HeldInterrupts() as interrupts:
            process = subprocess.Popen(
                command, cwd=cwd, env={**os.environ, **additional_env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, encoding="utf-8", errors="replace", start_new_session=True,
            )  # fmt: skip
            assert process.stdout is not None
            assert process.stderr is not None
            out, error = _Pump(process.stdout, on_output), _Pump(process.stderr, on_error)
            late = _wait(process, seconds=self._seconds, interrupts=interrupts)
        result = CommandResult(stdout=out.text(), stderr=error.text(), code=process.returncode)
        if late:
            raise UnreachableError(
                f"pulumi {args[0]} was not done after {self._seconds:.0f} s and was interrupted; what it finished is in"
                " the state",
                hint="run it again to go on; --deadline-minutes gives it longer",
            )
        if process.returncode != 0:
            raise create_command_error(result)
        return result


class _Pump:
    """Reads a stream to its end beside the process."""

    def __init__(self, stream: IO[str], told: Line | None) -> None:
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(stream, told), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str], told: Line | None) -> None:
        with stream:
            for line in stream:
                self._lines.append(line)
                if told is not None:
                    told(line.rstrip("\n"))

    def text(self) -> str:
        self._thread.join(timeout=READ_SECONDS)
        return "".join(self._lines)


class _HeldInterrupts:
    """Interrupts wait until somebody can pass them on: one that comes while the process is being made would leave an
    engine behind that goes on, holds the stack's lock and has nobody who listens.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _HeldInterrupts:
        if threading.current_thread() is threading.main_thread():  # signals reach no other
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, lambda came, _: self._came.append(came))
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def release(self) -> None:
        """From here on they arrive as before; one that came meanwhile arrives now."""
        self._restore()
        for number in self._came:
            signal.raise_signal(number)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[str], *, seconds: float, interrupts: _HeldInterrupts) -> bool:
    """Until it ends; whether it had to be interrupted."""
    try:
        interrupts.release()
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return True
    except KeyboardInterrupt:
        _end(process)
        raise
    return False


def _end(process: subprocess.Popen[str]) -> None:
    """Ask; a second interrupt of a person asks again, which makes the engine abort what it began; then kill."""
    for seconds in (GRACE_SECONDS, ABORT_SECONDS):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
        return
    process.kill()
    process.wait(timeout=ABORT_SECONDS)
    # Plugins outlive an engine that had no time to end them.
    for pid in session_members(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def session_members(leader: int) -> list[int]:
    """Processes of a session, whatever groups they made for themselves; none where there is no /proc."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
    return found
