"""The warm process of a node, from which ranks are forked.

Importing torch takes seconds on a small machine and, on a large one, seconds from a shared file system times every
rank. The zygote does it once and forks a rank in milliseconds, at the first start and after each failure; the pages of
the imported code are shared. It must stay single-threaded and must never touch CUDA, create a process group, a socket
of ZeroMQ or an event loop: those do not survive a fork.

It reads commands from standard input and writes events to standard output, one JSON object a line. It ends, and its
ranks with it, when standard input closes, so nothing outlives the agent; ranks also die with the zygote by the kernel's
parent-death signal.

    {"do": "spawn", "job": "rank-0", "call": "rank", "env": {...}, "log": PATH}
    {"do": "kill"}
    {"is": "spawned", "job": "rank-0", "pid": N}
    {"is": "exited", "job": "rank-0", "pid": N, "code": -9, "monotonic": T}
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from training.processes import die_with_parent

CALLS = {"rank": "training.rank", "two_steps": "training.preflight.job"}
"""What may be forked: name to module with a `main() -> int`."""
# torch._dynamo: the first optimizer or meta device imports it, which takes seconds that each rank would pay after the
# fork.
_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.optim",
    "safetensors.torch",
    "pydantic",
    "numpy",
    "training.rank",
    "training.preflight.two_steps",
)


def main() -> int:
    """Serve until standard input closes."""
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forked ranks share these pages; the collector must not touch them
    children: dict[int, str] = {}
    _say({"is": "ready", "pid": os.getpid()})
    buffer = b""
    try:
        while True:
            # The time limit is only a belt: a SIGCHLD that arrives between the reap and the select wakes it through the
            # pipe.
            ready, _, _ = select.select([0, wakeup], [], [], 1.0)
            if wakeup in ready:
                with suppress(BlockingIOError):
                    os.read(wakeup, 4096)
            if 0 in ready:
                chunk = os.read(0, 65536)
                if not chunk:
                    return 0
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    _obey(json.loads(line), children=children)
            _reap(children)
    finally:
        _kill(children)


def _obey(command: dict[str, Any], *, children: dict[int, str]) -> None:
    if command["do"] == "kill":
        _kill(children)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(command)
    children[pid] = command["job"]
    _say({"is": "spawned", "job": command["job"], "pid": pid})


def _become(command: dict[str, Any]) -> NoReturn:
    """The child's side of the fork: leave everything of the zygote behind, then run the call; never returns."""
    code = 70
    try:
        zygote = os.getppid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != zygote:  # it died before the kernel knew
            os._exit(1)
        os.setpgid(0, 0)  # the loader workers are in this group too
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = Path(command["log"])
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(command["env"])
        code = int(importlib.import_module(CALLS[command["call"]]).main())
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - the last boundary of this process: print, then end with a code of its own
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, str]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            _say({"is": "exited", "job": children.pop(pid), "pid": pid, "code": code, "monotonic": time.monotonic()})


def _kill(children: dict[int, str]) -> None:
    for pid in children:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # the group, so that loader workers go as well
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while children and time.monotonic() < deadline:
        _reap(children)
        if children:
            select.select([], [], [], 0.005)


def _say(event: dict[str, Any]) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
