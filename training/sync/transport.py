"""One kept-open HTTP connection to the syncer, and calls that outlive its restarts.

Every socket operation has a deadline. A call that gets no answer is repeated with the same bytes, with growing and
jittered pauses, until its deadline; the syncer's answers are made for that. A refusal is never repeated, nor is a
handshake in which one side did not know the other.
"""

from __future__ import annotations

import http.client
import logging
import random
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Struct

from spec.errors import RefusedError, UnreachableError
from spec.sync_keys import SyncKeys, open_connection
from training.sync.chunks import PIECE_BYTES, Pace
from training.sync.messages import ErrorReply
from training.sync.refusals import RETRY_STATUS

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_STRANGERS = (
    "CERTIFICATE_VERIFY_FAILED", "CERTIFICATE_REQUIRED", "UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_EXPIRED",
    "CERTIFICATE_UNKNOWN", "DECRYPT_ERROR", "WRONG_VERSION_NUMBER",
)  # fmt: skip
"""In OpenSSL's names of errors: a certificate is not of this run, or one side speaks no TLS. Others may pass."""
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
    """Empty if it was read into the caller's memory."""

    def read(self, kind: type[T]) -> T:
        """The body as a message."""
        return msgspec.json.decode(self.body, type=kind)


class Link:
    """One connection, one call at a time; not shared between threads that must not wait for each other."""

    def __init__(
        self,
        address: str,
        *,
        run: str,
        timeout_seconds: float,
        closed: threading.Event,
        keys: SyncKeys | None = None,
        pace_out: Pace | None = None,
        pace_in: Pace | None = None,
    ) -> None:
        """`timeout_seconds`: longest silence of the other side in the middle of a call."""
        self.address, self._keys = address, keys
        self._pace_out, self._pace_in = pace_out or Pace(None), pace_in or Pace(None)
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
        into: memoryview | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Repeat one request until it is answered or `until` (monotonic) has passed.

        `patience_seconds` is how long the syncer may think; an answer that is not JSON goes `into` memory of its size.
        """
        pause, trouble = _FIRST_PAUSE, "no attempt was made"
        while True:
            try:
                response = self.ask_once(
                    path, method=method, body=body, patience_seconds=patience_seconds, into=into, headers=headers
                )
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLError) and any(one in (error.reason or "") for one in _STRANGERS):
                    raise self._strangers(error) from error
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
        into: memoryview | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One request; a kept connection that the other side has closed meanwhile is opened anew once."""
        with self._lock:
            kept = self._connection is not None
            try:
                return self._exchange(path, method, body, patience_seconds, into, headers or {})
            except (OSError, http.client.HTTPException):
                self._drop()
                if not kept:
                    raise
            try:
                return self._exchange(path, method, body, patience_seconds, into, headers or {})
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
        self,
        path: str,
        method: str,
        body: Sequence[bytes | memoryview],
        patience: float,
        into: memoryview | None,
        headers: Mapping[str, str],
    ) -> Response:
        if self._connection is None:
            self._connection = open_connection(
                self._host, int(self._port), timeout_seconds=self._timeout, keys=self._keys
            )
        connection = self._connection
        assert connection.sock is not None
        connection.sock.settimeout(self._timeout + patience)
        size = sum(len(one) for one in body)
        own = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        keys = self._keys.headers if self._keys else {}
        connection.request(
            method, f"/v1/{self._run}/{path}", body=self._pieces(body) if body else None,
            headers={**own, **keys, **headers},
        )  # fmt: skip
        response = connection.getresponse()
        data = self._receive(response, into if response.status == http.HTTPStatus.OK else None)
        if response.will_close:
            self._drop()
        return Response(status=response.status, headers=dict(response.headers), body=data)

    def _receive(self, response: http.client.HTTPResponse, into: memoryview | None) -> bytearray:
        length = int(response.headers.get("Content-Length", "0"))
        if into is not None and length != len(into):
            raise http.client.HTTPException(f"the answer has {length} bytes instead of {len(into)}")
        data = bytearray(length if into is None else 0)
        view, position = memoryview(data) if into is None else into, 0
        while position < length:
            self._wait(self._pace_in, min(PIECE_BYTES, length - position))
            size = response.readinto(view[position : position + PIECE_BYTES])
            if not size:
                raise http.client.IncompleteRead(b"", length - position)
            position += size
        if not length:
            response.read()
        return data

    def _pieces(self, body: Sequence[bytes | memoryview]) -> Iterable[bytes | memoryview]:
        for view in body:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self._wait(self._pace_out, len(piece))
                yield piece

    def _wait(self, pace: Pace, size: int) -> None:
        seconds = pace.take(size)
        if seconds > 0 and self._closed.wait(seconds):
            raise ConnectionAbortedError("the client is closed")

    def _strangers(self, error: ssl.SSLError) -> RefusedError:
        return RefusedError(
            f"this process and the syncer at {self.address} are not of the same run: {error.reason}",
            hint="learners and syncer of a run need the keys that `gkr launch` made for it; keys end with their run",
        )


def _read_error(response: Response) -> ErrorReply:
    try:
        return msgspec.json.decode(response.body, type=ErrorReply)
    except msgspec.DecodeError:
        return ErrorReply(reason="unreadable", message=f"status {response.status} with an unreadable body")
