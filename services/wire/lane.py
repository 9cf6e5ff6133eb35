"""The large tensors of one connection, both ways: in shared memory where both sides see it, else as frames.

Sits between the messages of the protocol and the socket: `outgoing` turns a message into what is sent, `opened` turns
what arrived into a message, `handle` takes the three kinds of message that only concern arenas. An arena is made and
offered when the first large message is sent, and used once the other side has mapped it; until then, whenever it is
full, and if anything about it fails, tensors travel as frames.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from services.wire.arena import (
    ARENA_BYTES,
    LARGE_BYTES,
    ArenaAddress,
    ArenaError,
    ReadArena,
    SendArena,
    is_envelope,
    pack_envelope,
    unpack_envelope,
)
from services.wire.frames import MAX_RELEASED, MAX_TENSORS, Buffer, FrameError, Header, Kind, pack

_log = logging.getLogger(__name__)
LANE_KINDS = frozenset({Kind.ARENA, Kind.MAPPED, Kind.RELEASE})


class Lane:
    """Used by one thread at a time, except that tensors may be let go of anywhere."""

    def __init__(self, *, shared: bool, arena_bytes: int = ARENA_BYTES) -> None:
        """`shared`: both sides said that they may see each other's memory."""
        self._shared, self._arena_bytes = shared, arena_bytes
        self._own: SendArena | None = None
        self._usable = False
        self._theirs: ReadArena | None = None
        self._read: deque[int] = deque()
        """Regions of theirs that nobody here looks at any more."""

    def outgoing(self, frames: Sequence[Buffer]) -> list[Sequence[Buffer]]:
        """The messages to send for one message: itself, perhaps after an offer."""
        if not self._shared or len(frames) <= 2 or sum(map(len, frames[2:])) < LARGE_BYTES:
            return [frames]
        if self._own is None:
            return [*self._offer(), frames]
        places = self._own.write(frames[2:]) if self._usable else None
        return [frames] if places is None else [[pack_envelope(places), *frames[:2]]]

    def opened(self, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """What arrived as a message of the protocol. FrameError for an envelope that is not one."""
        if not frames or not is_envelope(frames[0]):
            return frames
        if self._theirs is None or len(frames) != 3:
            raise FrameError("an envelope without an arena")
        try:
            places = unpack_envelope(frames[0], most=MAX_TENSORS)
            views = [np.frombuffer(self._theirs.read(place), dtype=np.uint8) for place in places]
        except ArenaError as error:
            raise FrameError(str(error)) from error
        for place, view in zip(places, views, strict=True):
            # Arrays made of this one keep it alive, so the region is in use as long as any of them.
            weakref.finalize(view, self._read.append, place.number)
        return [frames[1], frames[2], *(view.data for view in views)]

    def handle(self, header: Header) -> list[Sequence[Buffer]]:
        """Take a message of LANE_KINDS; what to send in answer. FrameError if it cannot be."""
        match header.kind:
            case Kind.ARENA:
                return [pack(Header(kind=Kind.MAPPED, credit=int(self._map(header.arena))))]
            case Kind.MAPPED:
                self._usable = self._own is not None and header.credit == 1
            case Kind.RELEASE:
                for number in header.released if self._own is not None else ():
                    self._own.release(number)  # type: ignore[union-attr]
            case other:
                raise FrameError(f"{other.name} does not concern arenas")
        return []

    def releases(self) -> list[Sequence[Buffer]]:
        """What to send so that the other side may use again what nobody here looks at."""
        if not self._read:
            return []
        numbers: list[int] = []
        while self._read and len(numbers) < MAX_RELEASED:
            numbers.append(self._read.popleft())
        return [pack(Header(kind=Kind.RELEASE, released=tuple(numbers)))]

    def close(self) -> None:
        """The connection is gone. Tensors that somebody still holds stay readable."""
        if self._own is not None:
            self._own.close()
        self._own = self._theirs = None
        self._shared = self._usable = False

    def _offer(self) -> list[Sequence[Buffer]]:
        try:
            self._own = SendArena(self._arena_bytes)
        except OSError as error:
            _log.info("no shared memory for large tensors: %s", error)
            self._shared = False
            return []
        return [pack(Header(kind=Kind.ARENA, arena=self._own.address))]

    def _map(self, address: tuple[int, ...]) -> bool:
        if not self._shared:
            return False
        try:
            self._theirs = ReadArena(ArenaAddress(*address))
        except (OSError, ArenaError, TypeError, ValueError, OverflowError) as error:
            _log.info("large tensors travel as frames: %s", error)
            return False
        return True
