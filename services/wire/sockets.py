"""How frames go into a ZeroMQ socket: small ones copied, large ones by reference, nothing ever waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from services.wire.frames import Buffer

BY_REFERENCE_BYTES = 1 << 16
"""Below this a copy costs less than keeping track of a buffer (measured; pyzmq's own threshold is the same)."""
_LAST, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)


def send_frames(socket: zmq.Socket[Any], frames: Sequence[Buffer]) -> None:
    """Send one message. Raises zmq.ZMQError if the socket cannot take it now; then nothing of it was sent."""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = _LAST if number == last else _MORE
        socket.send(frame, flags, copy=len(frame) < BY_REFERENCE_BYTES, track=False)
