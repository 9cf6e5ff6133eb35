"""Runs a command whose lines a person wants to see at once, within a deadline, and keeps the last of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from spec.errors import ConfigError, GkrError

TAIL_LINES = 30
_STOP_SECONDS = 30


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    tail: str
    """Its last lines, of both streams as they came."""


def stream(command: Sequence[str], *, deadline_seconds: float) -> Ended:
    """Run it with both streams on stderr. It and its children end at the deadline and when we are interrupted."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not on PATH") from None
    reader = threading.Thread(target=_pump, args=(process, tail), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout=deadline_seconds)
    except subprocess.TimeoutExpired:
        raise GkrError(f"{command[0]} was not done after {deadline_seconds:.0f} s and was ended") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=_STOP_SECONDS)
        # A child that outlives the command may hold the pipe; what it writes later is nobody's.
        reader.join(timeout=_STOP_SECONDS)
        if not reader.is_alive() and process.stdout is not None:
            process.stdout.close()
    return Ended(code, "\n".join(tail))


def _pump(process: subprocess.Popen[str], tail: deque[str]) -> None:
    for line in process.stdout or ():
        tail.append(line.rstrip())
        sys.stderr.write(line)
        sys.stderr.flush()
