"""One kept-open HTTP connection to the syncer, and calls that outlive its restarts.

Every socket operation has a deadline. A call that gets no answer is repeated with the same bytes, with growing and
jittered pauses, until its deadline; the syncer's answers are made for that. A refusal is never repeated.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Struct

from spec.errors import RefusedError, UnreachableError
from training.sync.messages import ErrorReply
from training.sync.refusals import RETRY_STATUS

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_CHUNK = 4 << 20
T = TypeVar("T", bound=Struct)


class SyncRefusedError(RefusedError):
    """The syncer understood and said no; `reason` is its word for programs."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(f"the syncer refused: {reply.message}", hint=reply.hint)
        self.reason = reply.reason


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer that is not a refusal."""

    status: int
    headers: dict[str, str]
    body: bytearray

    def read(self, kind: type[T]) -> T:
        """The body as a message."""
        return msgspec.json.decode(self.body, type=kind)


class Link:
    """One connection, one call at a time; not shared between threads that must not wait for each other."""

    def __init__(self, address: str, *, run: str, timeout_seconds: float, closed: threading.Event) -> None:
        self.address = address
        self._host, _, self._port = address.rpartition(":")
        self._run, self._timeout, self._closed = run, timeout_seconds, closed
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    def ask(
        self,
        path: str,
        *,
        until: float,
        method: str = "POST",
        body: Sequence[bytes | memoryview] = (),
        patience_seconds: float = 0.0,
        expected_bytes: int | None = None,
    ) -> Response:
        """Repeat one request until it is answered or `until` (monotonic) has passed.

        `patience_seconds` is how long the syncer may think; `expected_bytes` the size of an answer that is not JSON.
        """
        pause, trouble = _FIRST_PAUSE, "no attempt was made"
        while True:
            try:
                response = self.ask_once(
                    path, method=method, body=body, patience_seconds=patience_seconds, expected_bytes=expected_bytes
                )
            except (OSError, http.client.HTTPException) as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                if response.status < 400:
                    return response
                reply = _read_error(response)
                if response.status not in RETRY_STATUS and reply.reason != "damaged":
                    raise SyncRefusedError(reply)
                trouble = reply.message
            left = until - time.monotonic()
            if left <= 0 or self._closed.wait(min(left, pause * random.uniform(0.5, 1.0))):
                raise UnreachableError(
                    f"the syncer at {self.address} did not answer {path.split('?')[0]} in time ({trouble})",
                    hint="see the syncer's log; a supervisor restarts a syncer that died on the same ports",
                )
            pause = min(2 * pause, _LONGEST_PAUSE)

    def ask_once(
        self,
        path: str,
        *,
        method: str,
        body: Sequence[bytes | memoryview] = (),
        patience_seconds: float = 0.0,
        expected_bytes: int | None = None,
    ) -> Response:
        """One request; a kept connection that the other side has closed meanwhile is opened anew once."""
        with self._lock:
            kept = self._connection is not None
            try:
                return self._exchange(path, method, body, patience_seconds, expected_bytes)
            except (OSError, http.client.HTTPException):
                self._drop()
                if not kept:
                    raise
            try:
                return self._exchange(path, method, body, patience_seconds, expected_bytes)
            except (OSError, http.client.HTTPException):
                self._drop()
                raise

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(
        self, path: str, method: str, body: Sequence[bytes | memoryview], patience: float, expected_bytes: int | None
    ) -> Response:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, int(self._port), timeout=self._timeout)
            self._connection.connect()
        connection = self._connection
        assert connection.sock is not None
        connection.sock.settimeout(self._timeout + patience)
        headers = {"Content-Length": str(sum(len(one) for one in body)), "Content-Type": "application/octet-stream"}
        connection.request(method, f"/v1/{self._run}/{path}", body=_slices(body) if body else None, headers=headers)
        response = connection.getresponse()
        length = int(response.headers.get("Content-Length", "0"))
        if response.status == 200 and expected_bytes is not None and length != expected_bytes:
            raise http.client.HTTPException(f"the answer has {length} bytes instead of {expected_bytes}")
        data = bytearray(length)
        view, position = memoryview(data), 0
        while position < length:
            size = response.readinto(view[position:])
            if not size:
                raise http.client.IncompleteRead(bytes(data[:position]), length - position)
            position += size
        if not length:
            response.read()
        if response.will_close:
            self._drop()
        return Response(status=response.status, headers=dict(response.headers), body=data)


def _slices(body: Sequence[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    for piece in body:
        for start in range(0, len(piece), _CHUNK):
            yield piece[start : start + _CHUNK]


def _read_error(response: Response) -> ErrorReply:
    try:
        return msgspec.json.decode(response.body, type=ErrorReply)
    except msgspec.DecodeError:
        return ErrorReply(reason="unreadable", message=f"status {response.status} with an unreadable body")
