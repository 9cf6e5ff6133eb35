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
from collections.abc import Callable, Sequence

import numpy as np

from services.wire.arena import (
    ARENA_BYTES,
    LARGE_BYTES,
    MAX_RELEASED,
    ArenaAddress,
    ArenaError,
    Place,
    ReadArena,
    SendArena,
    is_envelope,
    pack_envelope,
    unpack_envelope,
)
from services.wire.frames import MAX_TENSORS, Buffer, FrameError, Header, Kind, pack

_log = logging.getLogger(__name__)
LANE_KINDS = frozenset({Kind.ARENA, Kind.MAPPED, Kind.RELEASE})


class Lane:
    """Used by one thread at a time, except that tensors may be let go of anywhere."""

    def __init__(
        self, *, shared: bool, arena_bytes: int = ARENA_BYTES, on_read: Callable[[], object] | None = None
    ) -> None:
        """`shared`: both sides said that they may see each other's memory. `on_read`: told, in whatever thread it is,
        that nobody here looks at some region of theirs any more."""
        self._shared, self._arena_bytes, self._on_read = shared, arena_bytes, on_read
        self._own: SendArena | None = None
        self._usable = False
        self._theirs: ReadArena | None = None
        self._read: deque[int] = deque()
        """Regions of theirs that nobody here looks at any more."""

    @property
    def regions(self) -> int:
        """How many of ours the other side looks at."""
        return self._own.used if self._own is not None else 0

    @property
    def has_read(self) -> bool:
        """Whether `releases` has something to say."""
        return bool(self._read)

    def room(self, size: int) -> np.ndarray | None:
        """Bytes for a large tensor that is to be sent without a copy, if there are any. Of any thread."""
        own = self._own
        return own.room(size) if own is not None and self._usable and size >= LARGE_BYTES else None

    def outgoing(self, frames: Sequence[Buffer]) -> Sequence[Sequence[Buffer]]:
        """The messages to send for one message: itself, perhaps after an offer."""
        if len(frames) == 1 and not self._read:
            return (frames,)
        offer: list[Sequence[Buffer]] = []
        places: Sequence[Place] = ()
        if self._shared and len(frames) > 1 and sum(map(len, frames)) >= LARGE_BYTES:
            if self._own is None:
                offer = self._offer()
            elif self._usable:
                places = self._own.write(frames[1:]) or ()
        if not places and not self._read:
            return [*offer, frames]
        envelope = pack_envelope(places, released=self._take_read())
        return [*offer, [envelope + bytes(frames[0]), *(() if places else frames[1:])]]

    def opened(self, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """What arrived as a message of the protocol. FrameError for an envelope that is not one."""
        if not frames or not is_envelope(frames[0]):
            return frames
        try:
            places, released, size = unpack_envelope(frames[0], most=MAX_TENSORS)
            for number in released if self._own is not None else ():
                self._own.release(number)  # type: ignore[union-attr]
            head = memoryview(frames[0])[size:]
            if not places:
                return [head, *frames[1:]]
            if self._theirs is None or len(frames) > 1:
                raise FrameError("an envelope without an arena")
            views = [np.frombuffer(self._theirs.read(place), dtype=np.uint8) for place in places]
        except ArenaError as error:
            raise FrameError(str(error)) from error
        for place, view in zip(places, views, strict=True):
            # Arrays made of this one keep it alive, so the region is in use as long as any of them.
            weakref.finalize(view, self._let_go, place.number)
        return [head, *(view.data for view in views)]

    def handle(self, header: Header) -> list[Sequence[Buffer]]:
        """Take a message of LANE_KINDS; what to send in answer. FrameError if it cannot be."""
        match header.kind:
            case Kind.ARENA:
                return [pack(Header(kind=Kind.MAPPED, credit=int(self._map(header.arena))))]
            case Kind.MAPPED:
                self._usable = self._own is not None and header.credit == 1
            case Kind.RELEASE:
                pass  # its envelope said it
            case other:
                raise FrameError(f"{other.name} does not concern arenas")
        return []

    def releases(self) -> Sequence[Sequence[Buffer]]:
        """What to send, if nothing else is, so that the other side may use again what nobody here looks at."""
        return self.outgoing(pack(Header(kind=Kind.RELEASE))) if self._read else ()

    def close(self) -> None:
        """The connection is gone. Tensors that somebody still holds stay readable."""
        if self._own is not None:
            self._own.close()
        self._own = self._theirs = None
        self._shared = self._usable = False
        self._on_read = None  # a tensor's last owner may be who is told, and would never go

    def _let_go(self, number: int) -> None:
        self._read.append(number)
        tell = self._on_read
        if tell is not None:
            tell()

    def _take_read(self) -> list[int]:
        return [self._read.popleft() for _ in range(min(len(self._read), MAX_RELEASED))]

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
