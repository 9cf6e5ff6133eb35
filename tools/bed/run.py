"""Runs commands inside a bed and `kubectl` against it. No command without a deadline; a failure carries its stderr."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from spec.errors import GkrError, UnreachableError
from tools.bed.holder import holder
from tools.bed.layout import Bed
from tools.binaries import binary


class CommandError(GkrError):
    """A command ended with another code than 0; `stderr` has what it said."""

    def __init__(self, message: str, *, code: int, stderr: str) -> None:
        super().__init__(message)
        self.code = code
        self.stderr = stderr


def execute(command: Sequence[str], *, stdin: str | None = None, deadline_seconds: float) -> str:
    """Run a command on the host and return its stdout."""
    try:
        done = subprocess.run(
            list(command), input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False, timeout=deadline_seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"no end within {deadline_seconds:g} s: {_short(command)}") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        tail = "\n  ".join(said.splitlines()[-12:])
        message = f"{_short(command)} ended with code {done.returncode}:\n  {tail}"
        raise CommandError(message, code=done.returncode, stderr=said)
    return done.stdout


def inside(bed: Bed, command: Sequence[str], *, stdin: str | None = None, deadline_seconds: float) -> str:
    """Run a command in the bed's network, mount and process namespaces."""
    return execute([*enter(bed), *command], stdin=stdin, deadline_seconds=deadline_seconds)


def kubectl(bed: Bed, *arguments: str, stdin: str | None = None, deadline_seconds: float = 60.0) -> str:
    """Run `kubectl` as the bed's administrator."""
    command = [f"{binary('kubectl')}", f"--kubeconfig={bed.kubeconfig}", *arguments]
    return execute(command, stdin=stdin, deadline_seconds=deadline_seconds)


def ctr(bed: Bed, *arguments: str, stdin: str | None = None, deadline_seconds: float = 60.0) -> str:
    """Run containerd's client on the bed's images and containers."""
    command = ["ctr", "--address", f"{bed.containerd_socket}", "--namespace", "k8s.io", *arguments]
    return inside(bed, command, stdin=stdin, deadline_seconds=deadline_seconds)


def enter(bed: Bed) -> list[str]:
    """The start of a command line that runs the rest inside the bed."""
    found = holder(bed)
    if found is None:
        raise UnreachableError(f"{bed.name} is not up", hint="make cluster")
    return ["nsenter", f"--target={found.pid}", "--net", "--mount", "--pid", "--cgroup", "--wd=/", "--"]


def _short(command: Sequence[str]) -> str:
    words = [word for word in command if not word.startswith(("--kubeconfig=", "--target="))]
    text = " ".join(words)
    return text if len(text) <= 200 else f"{text[:200]} ..."
