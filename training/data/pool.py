"""Loader workers as processes: how one is started, spoken to, found dead, and never left behind.

Workers are children of multiprocessing's forkserver, so that none inherits a thread, a socket, a CUDA context or a
lock of the rank, and a new one costs a fork. Who dies with whom: the rank's end of the forkserver's life pipe closes
with the rank, the forkserver exits, the kernel kills its children (`PR_SET_PDEATHSIG`); an idle worker also sees its
ticket pipe close. The resource tracker exits with the last of them. Nothing is shared by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.errors import ConfigError
from training.data.arena import ArenaFile
from training.data.tickets import RESULT, ROW, Ticket
from training.data.worker import Work, run_worker

_PIPE_BYTES = 2**20
_SERVER_END_SECONDS = 2.0
_F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ, Linux only


@dataclass(frozen=True)
class Result:
    """What a worker sent for one ticket."""

    ticket: Ticket
    kind: int
    memory: NDArray[np.uint8]
    """The arrays; empty if they are in the ticket's slot."""
    told: dict[str, Any]
    seconds: float
    """From when it could begin with the ticket until it had all been read."""


class WorkerProcess:
    """One running worker with the tickets it holds. Never blocks on the worker."""

    def __init__(self, work: Work, *, index: int, arena: ArenaFile | None = None) -> None:
        self.index = index
        self.tickets: list[Ticket] = []
        """What it was handed and has not answered, oldest first; it works in this order."""
        self.began = 0.0
        """When it could begin with the oldest."""
        self.row = -1
        """Which row of a careful ticket it began last."""
        self.is_alone = False
        """It has a careful ticket, and gets no other until that is answered."""
        self.is_late = False
        """Others were handed what it holds; it gets nothing until it answers."""
        context = multiprocessing.get_context("forkserver")
        ticket_reader, self._ticket_writer = context.Pipe(duplex=False)
        self._result_reader, result_writer = context.Pipe(duplex=False)
        with contextlib.suppress(OSError):  # the user's pipe memory may be used up; the default size works as well
            fcntl.fcntl(result_writer.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._result_reader.fileno(), False)
        os.set_blocking(self._ticket_writer.fileno(), False)
        self._process = _start(
            dict(os.environ), work, arena, ticket_reader, result_writer, name=f"loader-worker-{index}"
        )
        ticket_reader.close()
        result_writer.close()
        self._unsent = b""
        self._header = bytearray()
        self._body = np.empty(0, dtype=np.uint8)
        self._received = 0

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Readable once the process is dead."""
        return self._process.sentinel

    @property
    def results(self) -> int:
        """Descriptor that is readable when (part of) a result is there, or the worker is gone."""
        return self._result_reader.fileno()

    def hand(self, ticket: Ticket) -> None:
        """Give it one more ticket."""
        if not self.tickets:
            self.began = time.monotonic()
        self.tickets.append(ticket)
        self._unsent += ticket.pack()
        self.send()

    def send(self) -> bool:
        """Send what the pipe could not take yet; whether all of it went."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._ticket_writer.fileno(), self._unsent) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it just died: the sentinel tells, and the tickets go back
            self._unsent = b""
        return True

    def receive(self) -> Iterator[Result]:
        """All results that are complete by now; returns when the pipe is empty or closed."""
        while True:
            if len(self._header) < RESULT.size:
                data = self._read_some(RESULT.size - len(self._header))
                if not data:
                    return
                self._header += data
                if len(self._header) < RESULT.size:
                    continue
                _, arrays, told, row, kind = RESULT.unpack(self._header)
                self.row = row if kind == ROW else -1  # who answers has all its rows behind it
                if kind == ROW:
                    self._header = bytearray()
                    continue
                self._body, self._received = np.empty(arrays + told, dtype=np.uint8), 0
            position, arrays, told, _, kind = RESULT.unpack(self._header)
            if not self._fill_body():
                return
            self._header = bytearray()
            ticket = self.tickets.pop(0)
            assert ticket.position == position
            began, self.began = self.began, time.monotonic()
            self.row, self.is_alone, self.is_late = -1, False, False
            yield Result(
                ticket, kind, self._body[:arrays], json.loads(self._body[arrays:].tobytes()), self.began - began
            )

    def reap(self, *, timeout_seconds: float) -> tuple[str, bool]:
        """The cause of its death, and whether it is surely gone; kills it if it outlives the deadline."""
        self._process.join(timeout_seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(timeout_seconds)
        self._result_reader.close()
        # Without its forkserver a worker is killed by the kernel a moment after the forkserver's end can be seen.
        is_gone = self._process.exitcode is not None and _await_end(self.pid, timeout_seconds)
        return _cause(self._process.exitcode), is_gone

    def release(self) -> None:
        """Tell it to end when it has finished what it is doing."""
        self._ticket_writer.close()

    def _fill_body(self) -> bool:
        """Read more of the result's body; whether it is complete."""
        while self._received < len(self._body):
            try:
                count = os.readv(self._result_reader.fileno(), [self._body[self._received :].data])
            except BlockingIOError:
                return False
            if count == 0:
                return False
            self._received += count
        return True

    def _read_some(self, size: int) -> bytes:
        try:
            return os.read(self._result_reader.fileno(), size)
        except BlockingIOError:
            return b""


def _start(*arguments: object, name: str) -> ForkServerProcess:
    """A started worker. A forkserver killed a moment ago can still look alive: then once more, when it is gone."""
    for last in (False, False, True):
        process = ForkServerProcess(target=run_worker, args=arguments, name=name, daemon=True)
        try:
            _own_forkserver()
            with _without_main():
                process.start()
        except (EOFError, ConnectionError, FileNotFoundError):
            if last:
                raise
            _await_end_of_forkserver()
        except OSError as error:
            if "AF_UNIX path too long" not in str(error):
                raise
            raise ConfigError(
                f"the temporary folder {tempfile.gettempdir()} is too long a name: sockets in it could not be bound",
                hint="set TMPDIR to a short folder such as /tmp",
            ) from error
        else:
            return process
    raise AssertionError


def _cause(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit"
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-exit_code).name
    # The forkserver reports a death; when it was itself killed, nobody can, and multiprocessing says 255.
    return "forkserver died" if exit_code == 255 else f"exit {exit_code}"


def _own_forkserver() -> None:
    """Make sure that the forkserver to be used is this process's own child, with our preload.

    A rank is itself forked. If its parent had used multiprocessing, the module's state would name the parent's
    server, which a fork cannot use (`waitpid` of a process that is not our child), and our copy of its life pipe
    would keep that server alive after the parent.
    """
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
    pid: int | None = server._forkserver_pid  # noqa: SLF001
    if pid is not None and not _is_our_child(pid):
        os.close(server._forkserver_alive_fd)  # noqa: SLF001
        server.__init__()
        # The temporary folder is the parent's as well; the preload module removes the folder of its own server.
        multiprocessing.current_process()._config.pop("tempdir", None)  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
    forkserver.set_forkserver_preload(["training.data.preload"])


def _await_end_of_forkserver() -> None:
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
    pid: int | None = server._forkserver_pid  # noqa: SLF001
    if pid is not None:
        _await_end(pid, _SERVER_END_SECONDS)


def _await_end(pid: int, timeout_seconds: float) -> bool:
    """Whether a process has ended within the time; it need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(timeout_seconds * 1000))
    finally:
        os.close(descriptor)


def _is_our_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@contextlib.contextmanager
def _without_main() -> Generator[None]:
    """Hide `__main__` while a worker starts: multiprocessing would import it there again, and with it torch."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
