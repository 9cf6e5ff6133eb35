"""`gkr exec`: a command in a pod of a run; which pod is meant is pure, the two ways of running it are at the end.

Without a terminal the API server's own exec carries the output and the exit code. With one, `kubectl exec -it` is
started, because raw terminals and window sizes are its trade.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from spec.errors import EXIT_INTERRUPTED, NotFoundError, RefusedError, UnreachableError

if TYPE_CHECKING:
    from gkr.cluster.connection import Connection
    from gkr.cluster.logs import PodRef


@dataclass(frozen=True)
class Target:
    """Which pod a person means. Nothing given: the first learner's first trainer pod, where rank 0 is."""

    learner: str | None = None
    role: str | None = None
    group: str | None = None
    node: str | None = None
    pod: str | None = None

    def __str__(self) -> str:
        given = {"learner": self.learner, "role": self.role, "group": self.group, "node": self.node, "pod": self.pod}
        return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)


def choose_pod(pods: Sequence[PodRef], *, target: Target, learners: Sequence[str], run: str) -> PodRef:
    """The one pod. `--node` takes a node's name or a number: that pod of the group, from 0 on."""
    index = int(target.node) if target.node is not None and target.node.isdecimal() else None
    matching = [one for one in pods if _matches(one, target, by_number=index is not None)]
    running = [one for one in matching if one.running]
    order = {name: at for at, name in enumerate(learners)}
    ordered = sorted(running, key=lambda one: (_rank(one, target), order.get(one.learner, len(order)), one.name))
    if index is not None:
        group = [one for one in ordered if (one.learner, one.role, one.group) == _key(ordered[0])] if ordered else []
        ordered = group[index : index + 1]
    if ordered:
        return ordered[0]
    what = f"pod with {target}" if f"{target}" else "pod"
    if matching and not running:
        text = f"run {run}: its {what} is not running: {matching[0].name}"
        raise RefusedError(text, hint=f"`gkr why {run}` says what it waits for")
    there = ", ".join(f"{one.name} ({one.role} on {one.node or 'no node'})" for one in pods[:6])
    hint = f"there are: {there}" if there else f"`gkr why {run}` says what it waits for"
    raise NotFoundError(f"run {run} has no {what}", hint=hint)


def run_plain(connection: Connection, pod: PodRef, *, command: Sequence[str], stdin: BinaryIO | None) -> int:
    """Output as it comes; the command's exit code. As long as the command takes."""
    from lightkube.core.exceptions import ApiError

    out, err = _Flushing(sys.stdout.buffer), _Flushing(sys.stderr.buffer)
    with connection.translate(f"run {command[0]} in pod {pod.name}"):
        try:
            done = connection.client.exec(
                pod.name,
                namespace=pod.namespace,
                container=pod.container,
                command=list(command),
                stdin=stdin,
                stdout=cast("BinaryIO", out),
                stderr=cast("BinaryIO", err),
            )
        except ApiError as error:
            raise _mended(error, command[0], pod) or error from None
    return int(done.exit_code)


def run_interactive(connection: Connection, pod: PodRef, *, command: Sequence[str]) -> int:
    """In this terminal, by kubectl, with the context that the run was launched in."""
    kubectl = shutil.which(os.environ.get("GKR_KUBECTL") or "kubectl")
    if kubectl is None:
        hint = "install it, name it with GKR_KUBECTL, or pipe something in: without a terminal gkr needs no kubectl"
        raise UnreachableError("an interactive command needs kubectl, which is not on PATH", hint=hint)
    words = [
        kubectl, "--context", connection.context, "--namespace", pod.namespace, "exec", "-it", pod.name,
        "--container", pod.container, "--", *command,
    ]  # fmt: skip
    environment = {**os.environ, "KUBECONFIG": connection.kubeconfig}
    try:
        return subprocess.run(words, env=environment, check=False).returncode
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def piped_stdin() -> BinaryIO | None:
    """What was piped in; none for a terminal, for nothing, and where there is no stdin."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read()
    return io.BytesIO(data) if data else None


def _matches(one: PodRef, target: Target, *, by_number: bool) -> bool:
    if target.pod is not None and not one.name.startswith(target.pod):
        return False
    if target.learner not in (None, one.learner):
        return False
    if target.role not in (None, one.role) or target.group not in (None, one.group, one.role):
        return False
    return target.node is None or by_number or one.node == target.node


def _rank(one: PodRef, target: Target) -> int:
    """Trainers before the head before the others, where nothing is asked for."""
    del target
    return {"trainer": 0, "head": 1, "syncer": 3}.get(one.role, 2)


def _key(one: PodRef) -> tuple[str, str, str]:
    return one.learner, one.role, one.group


def _mended(error: Any, command: str, pod: PodRef) -> RefusedError | NotFoundError | None:
    text = " ".join(str(error.status.message or "").split())
    if "executable file not found" in text or "no such file or directory" in text:
        return NotFoundError(f'there is no command "{command}" in pod {pod.name}', hint="write it with its full path")
    if "container not found" in text or "is not running" in text:
        return RefusedError(f"the container of pod {pod.name} is not running", hint="`gkr why` says what it waits for")
    return None


class _Flushing:
    """A stream that shows every piece at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        """Write and flush."""
        count = self._stream.write(data)
        self._stream.flush()
        return count
