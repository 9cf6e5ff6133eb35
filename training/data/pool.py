"""Loader workers as processes: how one is started, spoken to, found dead, and never left behind.

Workers are children of multiprocessing's forkserver, so that none inherits a thread, a socket, a CUDA context or a
lock of the rank, and a new one costs a fork. Who dies with whom: the rank's end of the forkserver's life pipe closes
with the rank, the forkserver exits, the kernel kills its children (`PR_SET_PDEATHSIG`); an idle worker also sees its
ticket pipe close. The resource tracker exits with the last of them. Nothing is shared by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any

from spec.errors import ConfigError
from training.data.worker import RESULT, TICKET, Work, run_worker

_PIPE_BYTES = 2**20
_SERVER_END_SECONDS = 2.0
_F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ, Linux only


class Result:
    """What a worker sent for one ticket."""

    def __init__(self, position: int, kind: int, body: bytearray) -> None:
        self.position = position
        self.kind = kind
        self.body = body


class WorkerProcess:
    """One running worker with the tickets it holds. Never blocks on the worker."""

    def __init__(self, work: Work, *, index: int) -> None:
        self.index = index
        self.tickets: list[int] = []
        """Positions it was handed and has not answered, oldest first."""
        context = multiprocessing.get_context("forkserver")
        ticket_reader, self._ticket_writer = context.Pipe(duplex=False)
        self._result_reader, result_writer = context.Pipe(duplex=False)
        with contextlib.suppress(OSError):  # the user's pipe memory may be used up; the default size works as well
            fcntl.fcntl(result_writer.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._result_reader.fileno(), False)
        self._process = _start(work, ticket_reader, result_writer, name=f"loader-worker-{index}")
        ticket_reader.close()
        result_writer.close()
        self._header = bytearray()
        self._body = bytearray()
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

    def hand(self, position: int) -> None:
        """Give it one more position to prepare."""
        self.tickets.append(position)
        with contextlib.suppress(
            BrokenPipeError
        ):  # it just died: the sentinel tells, and the ticket goes back with the others
            os.write(self._ticket_writer.fileno(), TICKET.pack(position))

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
                self._body, self._received = bytearray(RESULT.unpack(self._header)[1]), 0
            position, size, kind = RESULT.unpack(self._header)
            while self._received < size:
                with memoryview(self._body)[self._received :] as rest:
                    try:
                        count = os.readv(self._result_reader.fileno(), [rest])
                    except BlockingIOError:
                        return
                if count == 0:
                    return
                self._received += count
            result = Result(position, kind, self._body)
            self._header = bytearray()
            self.tickets.remove(position)
            yield result

    def reap(self, *, timeout_seconds: float) -> str:
        """The cause of its death, once dead; kills it if it outlives the deadline."""
        self._process.join(timeout_seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(timeout_seconds)
        cause = _cause(self._process.exitcode)
        self._result_reader.close()
        return cause

    def release(self) -> None:
        """Tell it to end when it has finished what it is doing."""
        self._ticket_writer.close()

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
    with contextlib.suppress(ProcessLookupError, TypeError):
        descriptor = os.pidfd_open(server._forkserver_pid)  # noqa: SLF001
        try:
            select.select([descriptor], [], [], _SERVER_END_SECONDS)
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
