"""One connection of a client to one replica. A broken connection is never mended: its successor is a new socket.

ZeroMQ would connect again by itself, but messages sent into the old connection would be lost in silence and new ones
could overtake the greeting. So each link lives for one connection, and what follows a loss is decided above it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from services.wire.frames import (
    FEATURE_ARENA,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    MAX_FRAME_BYTES,
    Buffer,
    FrameError,
    Header,
    Kind,
    Message,
    pack,
    unpack,
)
from services.wire.lane import LANE_KINDS, Lane
from services.wire.seal import Seals, accept_challenge, new_nonce
from services.wire.sockets import receive_frames, send_frames
from spec.services import Replica

_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN = (
    zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WORDS = {
    int(zmq.Event.DISCONNECTED): "ended",
    int(zmq.Event.CLOSED): "closed",
    int(zmq.Event.CONNECT_RETRIED): "failed",
}


class LinkLost(Exception):  # noqa: N818 - an event in the life of a link
    """The connection is gone or could not be made."""


class Link:
    """A DEALER socket on one endpoint, with its monitor."""

    def __init__(
        self, replica: Replica, *, context: zmq.Context[Any], hello: Header, hwm: int, secret: bytes = b""
    ) -> None:
        """`secret`: what the replica has to prove that it knows; then everything is sealed."""
        self.replica = replica
        self.welcomed = False
        self.lane = Lane(shared=False)
        self._secret = secret
        self._seals: Seals | None = None
        self._hello = msgspec.structs.replace(hello, nonce=new_nonce()) if secret else hello
        self.give_up_at = time.monotonic() + HEARTBEAT_TIMEOUT_MS / 1000
        """Not welcomed by then: something else listens there, or nothing."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.SNDHWM, hwm)
        self.socket.setsockopt(zmq.RCVHWM, hwm)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._watched = [(self.socket, int(zmq.POLLIN))]
        self.monitor = self.socket.get_monitor_socket(int(_UP | _DOWN))
        try:
            self.socket.connect(replica.endpoint)
        except zmq.ZMQError:
            self.give_up_at = 0.0  # an address that cannot be one: lost at the next look

    def watch(self) -> None:
        """Greet when connected. Raises LinkLost once the connection is gone or was not welcomed in time."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event & _DOWN:
                raise LinkLost(f"{self.replica.endpoint}: connection {_WORDS.get(event, 'refused')}")
            if event & _UP:
                self.send(pack(self._hello))
        if not self.welcomed and time.monotonic() >= self.give_up_at:
            raise LinkLost(f"{self.replica.endpoint} did not welcome us in time")

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send without waiting. Raises LinkLost if ZeroMQ cannot take it, which within the grant means it is gone."""
        self._send_all(self.lane.outgoing(frames))

    def release_read(self) -> None:
        """Tell the replica which large tensors of its replies nobody looks at any more."""
        if self.lane.has_read:
            self._send_all(self.lane.releases())

    def receive(self) -> Generator[Message]:
        """The messages that are here, one as a rule. Raises LinkLost for bytes that are not of this protocol."""
        while True:
            try:
                message = self._opened(receive_frames(self.socket))
            except zmq.Again:
                return
            except FrameError as error:
                raise LinkLost(f"{self.replica.endpoint} sent something else: {error}") from error
            if message is not None:
                yield message
                del message  # or its tensors would live on here
            if not zmq.zmq_poll(self._watched, 0):  # cheaper than the exception of a receive that finds nothing
                return

    def _opened(self, frames: Sequence[Buffer]) -> Message | None:
        """The message, unless it concerned only this link and is dealt with."""
        if self._secret:
            unsealed = self._unsealed(frames)
            if unsealed is None:
                return None
            frames = unsealed
        message = unpack(self.lane.opened(frames))
        kind = message.header.kind
        if kind in LANE_KINDS:
            self._send_all(self.lane.handle(message.header))
            return None
        if kind is Kind.WELCOME and not self.welcomed:
            shared = self._hello.features & message.header.features & FEATURE_ARENA
            self.lane = Lane(shared=bool(shared))
        return message

    def _send_all(self, messages: Sequence[Sequence[Buffer]]) -> None:
        try:
            for message in messages:
                send_frames(self.socket, message if self._seals is None else self._seals.close(message))
        except zmq.ZMQError as error:
            raise LinkLost(f"{self.replica.endpoint}: {error}") from error

    def _unsealed(self, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """What arrived; none if it was the replica's challenge, which is answered here. FrameError if it is a fake."""
        if self._seals is not None:
            return self._seals.open(frames)
        self._seals = accept_challenge(self._secret, frames, nonce=self._hello.nonce)
        self._send_all([pack(self._hello)])
        return None

    def close(self, *, farewell: bool = False) -> None:
        """Close both sockets."""
        if farewell and self.welcomed:
            try:
                self.send(pack(Header(kind=Kind.BYE)))
            except LinkLost:
                farewell = False
        self.lane.close()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=HEARTBEAT_MS if farewell else 0)


def is_local(endpoint: str) -> bool:
    """Whether an endpoint can only be on this machine."""
    return endpoint.startswith(("ipc://", "inproc://", "tcp://127.", "tcp://[::1]"))
