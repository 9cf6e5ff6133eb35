"""What the benchmarks of services share: one small service, processes that serve and ask, and clients of either kind.

Every process is spawned, speaks to the benchmark through a pipe, and ends when the benchmark does. No wait is without a
deadline.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import psutil
from msgspec import Struct

from services.client import ServiceClient
from services.directory import write_directory
from services.registry import CLASSES, load_class
from services.server import Server
from services.service import Call, Method, Reply, Service, ServiceContext
from spec.errors import GkrError
from spec.services import Directory, Replica, ServiceKind

SPAWN = multiprocessing.get_context("spawn")
DEADLINE_SECONDS = 60.0


class Work(Struct, frozen=True, kw_only=True):
    """Takes so long, and is answered with so many bytes. Tensors: anything."""

    seconds: float = 0.0
    size: int = 0
    number: int = 0


class Done(Struct, frozen=True, kw_only=True):
    """Tensors: `data` uint8 [size], if any were asked for."""

    number: int


class Worker(Service):
    """Holds the replica as long as each call says, as a device would."""

    methods: ClassVar[tuple[Method, ...]] = (Method("work", Work, Done),)

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._data = np.zeros(1 << 24, dtype=np.uint8)

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """Answer what was asked, later."""
        seconds = sum(call.args.seconds for call in calls)
        if seconds:
            time.sleep(seconds)
        return [self._answer(call.args) for call in calls]

    def _answer(self, args: Work) -> Reply:
        return Reply(Done(number=args.number), {"data": self._data[: args.size]} if args.size else {})


class Started:
    """A spawned process and the pipe to it."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self.pid = process.pid or 0

    def hear(self, *, deadline_seconds: float = DEADLINE_SECONDS) -> Any:
        """What it says next."""
        if not self._pipe.poll(deadline_seconds):
            raise TimeoutError(f"{self._process.name} said nothing for {deadline_seconds:g} s")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"{self._process.name} has ended; what it said before tells why") from error

    def tell(self, what: Any) -> None:
        """Say something to it."""
        self._pipe.send(what)

    def kill(self) -> None:
        """SIGKILL, as the machine would."""
        self._process.kill()
        self._process.join(DEADLINE_SECONDS)

    def cpu_seconds(self) -> float:
        """Of all its threads so far."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def memory_bytes(self) -> int:
        """What it has in memory; shared pages count by their share."""
        return psutil.Process(self.pid).memory_full_info().pss


@contextmanager
def started(target: Callable[..., None], *args: Any) -> Generator[Started]:
    """`target(pipe, *args)` in a process of its own, which is killed at the end."""
    here, there = cast("tuple[Connection, Connection]", SPAWN.Pipe())
    process = SPAWN.Process(target=target, args=(there, *args), name=target.__name__.strip("_"), daemon=True)
    process.start()
    there.close()
    one = Started(process, here)
    try:
        yield one
    finally:
        one.kill()
        here.close()


def until_told(pipe: Connection) -> Any:
    """What the benchmark says next; None if it is gone."""
    with suppress(EOFError, OSError):
        return pipe.recv()
    return None


def serve(pipe: Connection, bind: str, incarnation: int, context: dict[str, Any], options: dict[str, Any]) -> None:
    """Target of a process: a replica that is warm. Says its endpoint. `options` are the server's, `context` what is not
    to be as it is for a `Worker`."""
    fields: dict[str, Any] = {
        "kind": "encode", "name": "worker", "cache_dir": Path(tempfile.gettempdir()), "manifest": "", "max_batch": 1,
    }  # fmt: skip
    about = ServiceContext(**{**fields, **context})
    service = Worker(about) if about.name == "worker" else load_class(CLASSES[about.kind])(about)
    service.warm_up()
    with Server(service, bind=bind, incarnation=incarnation, **options) as server:
        pipe.send(server.endpoint)
        until_told(pipe)


def publish(
    path: Path,
    *,
    epoch: int,
    endpoints: Sequence[tuple[int, str]],
    service: str = "worker",
    kind: ServiceKind = "encode",
) -> Path:
    """A directory of replicas given as (incarnation, endpoint)."""
    replicas = [
        Replica(service=service, kind=kind, index=index, endpoint=endpoint, incarnation=incarnation)
        for index, (incarnation, endpoint) in enumerate(endpoints)
    ]
    write_directory(path, directory=Directory(epoch=epoch, replicas=replicas))
    return path


def ask(client: ServiceClient, work: Work, *, data: np.ndarray | None = None) -> Future[Reply]:
    """Submit one call."""
    tensors = {} if data is None else {"data": data}
    return client.submit("work", work, reply=Done, tensors=tensors, deadline_seconds=DEADLINE_SECONDS)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")
