"""How frames go into a ZeroMQ socket and out of it: small ones copied, large ones by reference, and never a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from services.wire.frames import Buffer

BY_REFERENCE_BYTES = 1 << 16
"""Below this a copy costs less than keeping track of a buffer (measured; pyzmq's own threshold is the same)."""
SPARE_MESSAGES = 16
"""Beside requests and their answers: greetings, credits, notices."""
_LAST, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)


def high_water_mark(grant: int) -> int:
    """Of a socket that must take so many requests or answers at once, however slowly the other side takes them.

    Twice as many: ZeroMQ tells the writing end of a pipe what was taken out only once it is half of the mark.
    """
    return 2 * (grant + SPARE_MESSAGES)


def send_frames(socket: zmq.Socket[Any], frames: Sequence[Buffer], *, route: bytes | None = None) -> None:
    """Send one message. Raises zmq.ZMQError if the socket cannot take it now; then nothing of it was sent."""
    if route is not None:
        socket.send(route, _MORE)
    left = len(frames)
    for frame in frames:
        left -= 1
        socket.send(frame, _MORE if left else _LAST, copy=len(frame) < BY_REFERENCE_BYTES, track=False)


def receive_frames(socket: zmq.Socket[Any]) -> list[Buffer]:
    """Take one message, without copies. Raises zmq.Again if there is none.

    A view keeps its frame's memory alive, so tensors can stay where they were received.
    """
    frame = socket.recv(_LAST, copy=False, track=False)
    if not frame.more:
        return [frame.buffer]
    frames: list[Buffer] = [frame.buffer]
    while frame.more:
        frame = socket.recv(_LAST, copy=False, track=False)
        frames.append(frame.buffer)
    return frames


def receive_routed(router: zmq.Socket[Any]) -> tuple[bytes, list[Buffer]]:
    """Take one message from a ROUTER, with the connection that it came from. Raises zmq.Again if there is none."""
    route = router.recv(_LAST)
    return route, receive_frames(router)
