"""HTTP as both ports of the syncer speak it: bounded bodies, JSON errors with a reason, connections that stay open.

Where the run has keys, every connection is TLS with a certificate of this run on both sides, every request has its
token, and a learner speaks only for itself. Nothing of a request is read before that is known.
"""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec import Struct

from spec.sync_keys import SyncKeys
from training.sync.messages import ErrorReply, encode
from training.sync.refusals import Refusal, RefusalLog

if TYPE_CHECKING:
    from training.sync.desk import Desk

_LOG = logging.getLogger(__name__)
JSON_LIMIT = 16 << 20
"""Largest JSON body: a layout of some hundred thousand parameters."""
_DISCARD_SECONDS = 5.0
"""Longest silence of a sender whose body is thrown away."""
_DISCARD_LONGEST_SECONDS = 60.0
_HANDSHAKE_SECONDS = 10.0
_LINGER_SECONDS = 1.0
_TLS_HANDSHAKE = b"\x16"
"""First byte of whoever speaks TLS."""
_CHUNK = 1 << 20
_DIGITS = 18
T = TypeVar("T", bound=Struct)


def read_count(text: str) -> int | None:
    """The number that a path or a header names; none if it is none. Bounded, and ASCII: `int` would raise otherwise."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None


def read_counts(parts: list[str]) -> list[int]:
    """The numbers of a path; none of them if one is none."""
    found = [number for one in parts if (number := read_count(one)) is not None]
    return found if len(found) == len(parts) else []


class SyncServer(ThreadingHTTPServer):
    """One port. A thread per connection: a learner holds a handful."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[Handler],
        *,
        run: str,
        keys: SyncKeys | None = None,
        refusals: RefusalLog | None = None,
    ) -> None:
        self.run, self.keys, self.refusals = run, keys, refusals or RefusalLog()
        self._desk: Desk | None = None
        super().__init__(address, handler, bind_and_activate=False)
        try:
            self.server_bind()
            self.server_activate()
        except OSError:
            self.server_close()
            raise

    def attach(self, desk: Desk) -> None:
        """Who answers; comes before `serve_forever`. Until then, callers wait in the backlog."""
        self._desk = desk

    @property
    def desk(self) -> Desk:
        assert self._desk is not None, "attach comes before serve_forever"
        return self._desk

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        """A connection that ends in an error is its own end only."""
        del request
        expected = isinstance(sys.exception(), OSError)
        _LOG.log(logging.DEBUG if expected else logging.ERROR, "connection of %s ended", client_address, exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Common part of both ports. Subclasses answer `handle_path` with the path below `/v1/<run>/`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 120
    """Seconds of silence after which a connection is closed."""
    server: SyncServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        """In the connection's own thread, so that one that stays silent keeps nobody waiting."""
        self.learner: str | None = None
        self._plain = False
        if self.server.keys is not None:
            self._shake_hands(self.server.keys)
        super().setup()

    def finish(self) -> None:
        """The server closes only the socket it has accepted, which TLS has taken over."""
        try:
            super().finish()
        finally:
            self.connection.close()

    def check_sender(self, learner: str) -> None:
        """Refuse who speaks for another learner than the one in its certificate."""
        if self.learner not in (None, learner):
            raise Refusal("sender", f"the certificate of learner {self.learner!r} does not speak for {learner!r}")

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def handle_path(self, path: list[str], query: dict[str, str]) -> None:
        """Answer one request."""
        raise NotImplementedError

    @property
    def desk(self) -> Desk:
        return self.server.desk

    def body_length(self, *, limit: int) -> int:
        """Announced length of the body, checked before any of it is read."""
        text = self.headers.get("Content-Length", "0")
        length = read_count(text)
        if length is None:
            self.close_connection = True  # nobody knows where the next request begins
            raise Refusal("bad_request", f"Content-Length {text[:40]!r} is not a number")
        if length > limit:
            raise Refusal("too_large", f"the body has {text} bytes, at most {limit} are taken here")
        return length

    def read_exactly(self, length: int) -> bytes:
        """So many bytes of the body."""
        data = self.rfile.read(length)
        self.unread -= len(data)
        if len(data) < length:
            raise ConnectionResetError("the body ended early")
        return data

    def read_into(self, view: memoryview) -> None:
        """Fill a buffer from the body."""
        position = 0
        while position < len(view):
            size = self.rfile.readinto(view[position : position + _CHUNK])  # pyright: ignore[reportAttributeAccessIssue]
            if not size:
                raise ConnectionResetError("the body ended early")
            position += size
            self.unread -= size

    def read_json(self, kind: type[T]) -> T:
        """The body as a message."""
        return self.decode(self.read_exactly(self.body_length(limit=JSON_LIMIT)), kind)

    def decode(self, data: bytes, kind: type[T]) -> T:
        """A message of the learner that sent it."""
        try:
            message = msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise Refusal("bad_request", f"not a {kind.__name__}: {error}") from error
        learner = getattr(getattr(message, "contribution", message), "learner", None)
        if learner is not None:
            self.check_sender(learner)
        return message

    def reply(self, message: Struct | None, *, status: int = 200) -> None:
        """Send a message."""
        self.send(b"{}" if message is None else encode(message), kind="application/json", status=status)

    def send(self, data: bytes, *, kind: str, status: int = 200) -> None:
        """Send a small body of a content type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not news."""

    def _serve(self) -> None:
        self.unread = read_count(self.headers.get("Content-Length", "0")) or 0
        try:
            try:
                self._dispatch()
            except Refusal as error:
                self._refuse(error)
            except OSError as error:
                if isinstance(error, (ConnectionError, TimeoutError)):
                    raise
                self._refuse(
                    Refusal(
                        "store_unavailable",
                        f"the syncer's store cannot be written: {error}",
                        hint="free space on its disk, or see why its bucket is away",
                    )
                )
        except (ConnectionError, TimeoutError) as error:
            _LOG.debug("connection of %s ended: %s", self.client_address, error)
            self.close_connection = True

    def _shake_hands(self, keys: SyncKeys) -> None:
        raw: socket.socket = self.request
        raw.settimeout(_HANDSHAKE_SECONDS)
        first = raw.recv(1, socket.MSG_PEEK)
        if first and first != _TLS_HANDSHAKE:
            self._plain = True  # is told so in its own language
            return
        tls = keys.server_context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        try:
            tls.do_handshake()
        except OSError as error:
            if isinstance(error, ssl.SSLError) and first:
                self.server.refusals.note("certificate", peer=self.client_address[0], message=f"no handshake: {error}")
                _linger(tls)
            tls.close()
            raise
        self.request = tls
        subject = (tls.getpeercert() or {}).get("subject", ())
        self.learner = dict(pair for name in subject for pair in name).get("commonName", "")  # type: ignore[misc]

    def _check_keys(self) -> None:
        keys = self.server.keys
        if keys is None:
            return
        if self._plain:
            hint = "learners are started by `gkr launch`, which gives them the keys of the run"
            raise Refusal("no_certificate", "this syncer speaks TLS only, with the certificates of its run", hint=hint)
        if not keys.knows(self.headers.get("Authorization", "")):
            raise Refusal("token", f"the token is not that of run {self.server.run!r}")

    def _dispatch(self) -> None:
        self._check_keys()
        address = urlsplit(self.path)
        parts = address.path.strip("/").split("/")
        if len(parts) < 3 or parts[0] != "v1":
            raise Refusal("unknown_path", f"{address.path} is not served here; paths begin with /v1/<run>/")
        if parts[1] != self.server.run:
            raise Refusal("unknown_run", f"this syncer serves run {self.server.run!r}, not {parts[1]!r}")
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        self.handle_path(parts[2:], query)

    def _refuse(self, error: Refusal) -> None:
        """Say no, then throw the rest of the body away: a sender that is cut off would see no reason."""
        peer = self.learner or self.client_address[0]
        self.server.refusals.note(error.reason, peer=peer, message=f"{self.command} {self.path}: {error.message}")
        self.reply(ErrorReply(reason=error.reason, message=error.message, hint=error.hint), status=error.status)
        self.connection.settimeout(_DISCARD_SECONDS)
        until = time.monotonic() + _DISCARD_LONGEST_SECONDS
        while self.unread > 0:
            size = len(self.rfile.read(min(self.unread, _CHUNK)))
            if not size or time.monotonic() > until:
                self.close_connection = True
                break
            self.unread -= size
        self.connection.settimeout(self.timeout)


def _linger(tls: ssl.SSLSocket) -> None:
    """Read on for a moment: closing on bytes that were not read would cut off the alert that says what is wrong."""
    raw = socket.socket(fileno=tls.detach())
    with raw:
        raw.settimeout(_LINGER_SECONDS)
        until = time.monotonic() + _LINGER_SECONDS
        raw.shutdown(socket.SHUT_WR)
        while time.monotonic() < until and raw.recv(_CHUNK):
            pass
