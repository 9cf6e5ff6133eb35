"""How a process asks a service: futures, deadlines, and no trace of which replica answered.

A `ServiceClient` runs one I/O thread with its own ZeroMQ context, made after any fork. It finds replicas in a directory
file, keeps one connection to each, sends within their grants, and when a replica dies sends what was unanswered to
another or to its successor. Each future is completed exactly once: with the reply, with `RefusedError` if the service
refused or broke, with `UnreachableError` if no answer came before the deadline. Delivery is at least once. One replica
computes a request once however often it arrives, and answers it again from memory; another replica may compute it too
after the first one died, so effects that must not add up over replicas need a key of their own in the arguments.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct

from services.asked import Asked
from services.courier import Awaited, Courier, Parcel
from services.service import Call, Reply, Service
from services.wire.frames import FrameError, Priority, encode_body, encode_tensors
from services.wire.seal import run_secret
from spec.errors import GkrError, RefusedError, UnreachableError
from spec.sync_keys import SHARED_ENVIRONMENT, SyncKeys

_log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How much later than its deadline a future may complete before the I/O thread itself is taken for broken."""
_LONGEST_SECONDS = 1e9


class Asks(Protocol):
    """What both clients offer."""

    def submit(
        self,
        method: str,
        args: Struct,
        *,
        reply: type[Struct],
        tensors: Mapping[str, np.ndarray] | None = None,
        deadline_seconds: float,
    ) -> Future[Reply]:
        """Ask, and get the reply later."""
        ...

    def call(
        self,
        method: str,
        args: Struct,
        *,
        reply: type[Struct],
        tensors: Mapping[str, np.ndarray] | None = None,
        deadline_seconds: float,
    ) -> Reply:
        """Ask, and wait for the reply."""
        ...

    def close(self) -> None:
        """Stop asking."""
        ...


class ServiceClient:
    """Asks the replicas of one service over ZeroMQ. Thread-safe. `identity` must be this client's alone."""

    def __init__(
        self,
        directory_path: Path,
        *,
        service: str,
        identity: str,
        max_waiting: int = 1024,
        priority: Priority = Priority.BLOCKING,
        secret: bytes | None = None,
        counted: bool = False,
    ) -> None:
        """`priority`: who waits for its requests, unless a request says otherwise. `secret`: what sealed replicas want
        proof of; by default that of this process's run, and of a platform's replica the platform's.
        `counted`: `asked` counts what is asked."""
        self.asked = Asked()
        self._counted = counted
        self._priority = priority
        self._service = service
        self._max_waiting = max_waiting
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        shared = run_secret(SyncKeys.read(variable=SHARED_ENVIRONMENT)) if secret is None else secret
        secret = run_secret(SyncKeys.read()) if secret is None else secret
        self._courier = Courier(directory_path, service=service, identity=identity, secret=secret, shared=shared)

    def submit(
        self,
        method: str,
        args: Struct,
        *,
        reply: type[Struct],
        tensors: Mapping[str, np.ndarray] | None = None,
        deadline_seconds: float,
        priority: Priority | None = None,
    ) -> Future[Reply]:
        """Ask; the future completes within the deadline. The tensors must not change until then.

        Raises RefusedError at once for what cannot travel, or if too many requests of this client wait already.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a ServiceClient does not survive a fork; make it in the process that uses it")
        if not abs(deadline_seconds) <= _LONGEST_SECONDS:  # nor is NaN
            raise RefusedError(
                f"{method} of {self._service} with a deadline of {deadline_seconds} s",
                hint="say how many seconds the reply is worth waiting for",
            )
        if self._courier.waiting >= self._max_waiting:
            raise RefusedError(
                f"{self._courier.waiting} requests to {self._service} wait for a turn already",
                hint="wait for some of the replies before asking more",
            )
        try:
            specs, raw = encode_tensors(tensors or {})
            body = encode_body(args)
        except FrameError as error:
            hint = "ask for less at once"
            raise RefusedError(f"{method} of {self._service}: {error}", hint=hint) from error
        number = next(self._numbers)
        parcel = Parcel(
            number=number,
            method=method,
            reply=reply,
            body=body,
            specs=specs,
            raw=raw,
            deadline_seconds=deadline_seconds,
            expires=time.monotonic() + deadline_seconds,
            future=Awaited(self._courier, number),
            priority=self._priority if priority is None else priority,
        )
        if self._counted:
            self.asked.watch(parcel.future)
        self._courier.take(parcel)
        return parcel.future

    def call(
        self,
        method: str,
        args: Struct,
        *,
        reply: type[Struct],
        tensors: Mapping[str, np.ndarray] | None = None,
        deadline_seconds: float,
    ) -> Reply:
        """Ask, and wait for the reply. Raises what the future would."""
        future = self.submit(method, args, reply=reply, tensors=tensors, deadline_seconds=deadline_seconds)
        try:
            return future.result(timeout=deadline_seconds + GRACE_SECONDS)
        except FutureTimeoutError as error:
            future.cancel()
            raise does_not_react() from error

    def close(self, *, deadline_seconds: float = 5.0) -> None:
        """Say goodbye; what is unanswered fails. A second call does nothing."""
        self._courier.close(deadline_seconds=deadline_seconds)


def does_not_react() -> UnreachableError:
    """Of a future that did not even expire."""
    return UnreachableError("the service's client in this process does not react", hint="this is a bug of ours")


class LocalClient:
    """Asks a service in this process, without a socket: the same calls, the same errors, no deadline and no batches."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()

    def submit(
        self,
        method: str,
        args: Struct,
        *,
        reply: type[Struct],
        tensors: Mapping[str, np.ndarray] | None = None,
        deadline_seconds: float,
    ) -> Future[Reply]:
        """Compute now, in the caller's thread; the future is complete when it is returned."""
        future: Future[Reply] = Future()
        try:
            future.set_result(self._compute(method, args, reply=reply, tensors=tensors))
        except RefusedError as error:
            future.set_exception(error)
        return future

    def call(
        self,
        method: str,
        args: Struct,
        *,
        reply: type[Struct],
        tensors: Mapping[str, np.ndarray] | None = None,
        deadline_seconds: float,
    ) -> Reply:
        """Compute now."""
        return self._compute(method, args, reply=reply, tensors=tensors)

    def close(self) -> None:
        """Nothing to close."""

    def _compute(
        self, method: str, args: Struct, *, reply: type[Struct], tensors: Mapping[str, np.ndarray] | None
    ) -> Reply:
        where = self._service.context.name
        try:
            with self._lock:
                answer = self._service.compute(method, [Call(args, dict(tensors or {}))])[0]
        except GkrError as error:
            answer = error
        except Exception as error:
            _log.exception("%s failed", method)
            raise RefusedError(f"{method} failed: {type(error).__name__}: {error}", where=where) from error
        if isinstance(answer, GkrError):
            raise RefusedError(answer.message, hint=answer.hint, where=where) from answer
        if not isinstance(answer.body, reply):
            raise RefusedError(f"{method} answered a {type(answer.body).__name__}, not a {reply.__name__}", where=where)
        return answer
