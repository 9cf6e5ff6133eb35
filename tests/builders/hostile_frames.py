"""Hostile bytes for everything that reads frames: good messages, small changes to them, and who has to refuse them.

The seeded test takes some thousands of inputs, `python -m tools.chaos frames` a million that follow coverage; both give
them to the same `TAKES`. Each says `read` or `refused`; any other exception is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from services.reception import MAX_VIOLATIONS, Reception
from services.wire.arena import ArenaError, Place, pack_envelope, unpack_envelope
from services.wire.frames import (
    INLINE_BYTES,
    MAX_TENSORS,
    Buffer,
    FrameError,
    Header,
    Kind,
    Priority,
    encode_body,
    encode_tensors,
    pack,
    pack_error,
    unpack,
)
from services.wire.seal import Gate, Seals, new_nonce
from tests.builders.echo import Echo, EchoArgs

METHODS = {method.name: method for method in Echo.methods}
_REPEATED_BYTES = 2**14
"""Of a frame that is made longer, so that memory that grows is the reader's."""

Frames = list[bytes]


def good_messages() -> list[Frames]:
    """One of each kind of message, with everything in it that a header can hold."""
    specs, raw = encode_tensors(
        {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.zeros((0, 5), np.uint8), "z": np.array(7)}
    )
    large, rest = encode_tensors({"x": np.zeros(INLINE_BYTES, np.uint8), "y": np.array(7)})
    body = encode_body(EchoArgs(text="some text", cost=2, key="key"))
    request = Header(kind=Kind.REQUEST, request=7, method="echo", tensors=specs, priority=Priority.PREFETCH)
    messages: list[list[Buffer]] = [
        pack(Header(kind=Kind.HELLO, identity="rank-0", incarnation=3, service="echo", expected=1, nonce=b"n" * 16)),
        pack(Header(kind=Kind.WELCOME, credit=8, credit_bytes=2**26, incarnation=3, service="echo", features=1)),
        pack(request, body, raw=raw),
        pack(Header(kind=Kind.REPLY, request=7, tensors=specs), body, raw=raw),
        pack_error(request=3, code="refused", message="no", hint="yes"),
        pack(Header(kind=Kind.CANCEL, request=7)),
        pack(Header(kind=Kind.ARENA, arena=(1, 2, 3, 2**28, 5))),
        pack(Header(kind=Kind.REPLY, request=7, tensors=large), body, raw=rest),
        [pack_envelope([], released=[1, 2, 3]) + bytes(pack(Header(kind=Kind.RELEASE))[0])],
        [pack_envelope([Place(1, 128, 48), Place(2, 256, 0)], released=[3]) + bytes(pack(request, body)[0])],
    ]
    return [[bytes(frame) for frame in message] for message in messages]


def mutated(random: Random, messages: Sequence[Frames]) -> Frames:
    """One message after a few changes: of bytes, lengths and frames."""
    frames = list(random.choice(messages))
    for _ in range(random.randint(1, 4)):
        if not frames:
            break
        at = random.randrange(len(frames))
        frame = frames[at]
        place = random.randrange(len(frame) + 1)
        number = random.choice((0, 1, 0x7F, 0x80, 0xC1, 0xC2, 0xC4, 0xDC, 0xDD, 0xDF, 0xFF, random.randrange(256)))
        some = bytes([number] * random.choice((1, 1, 4, 9)))
        match random.randrange(7):
            case 0:
                frames[at] = frame[:place] + some + frame[place + len(some) :]
            case 1:
                frames[at] = frame[:place] + some + frame[place:]
            case 2:
                frames[at] = frame[:place]
            case 3:
                frames[at] = frame[:place] + random.choice(random.choice(messages))[place:]
            case 4:
                del frames[at]
            case 5:
                frames.insert(at, frame)
            case _:
                frames[at] = frame[:_REPEATED_BYTES] * random.choice((2, 100))
    return frames


def _unpacks(frames: Frames) -> str:
    try:
        unpack(frames)
    except FrameError:
        return "refused"
    return "read"


def _receives(frames: Frames) -> str:
    here = Reception(METHODS, service="echo", incarnation=1, grant=4, grant_bytes=1000, budget_bytes=4000, max_batch=4)
    here.receive(b"route", pack(Header(kind=Kind.HELLO, identity="rank-0", incarnation=3, service="echo")), now=0)
    for _ in range(MAX_VIOLATIONS + 1):
        here.receive(b"route", frames, now=0)
    here.next_batch(0)
    for _, answer in here.outbox:
        unpack(answer)  # what is answered is well formed
    return "refused" if here.stats().violations else "read"


def _opens(frames: Frames) -> str:
    gate = Gate(b"s" * 32, is_connected=lambda _: True)
    try:
        opened = gate.open(b"route", frames)
    except FrameError:
        return "refused"
    if opened is None:
        gate.challenge(b"route", frames)
    return "read"


def _unseals(frames: Frames) -> str:
    seals = Seals(b"s" * 32, client=new_nonce(), replica=new_nonce(), is_client=True)
    try:
        seals.open(frames)
    except FrameError:
        return "refused"
    raise AssertionError("a seal was accepted that nobody made")


def _maps(frames: Frames) -> str:
    try:
        unpack_envelope(frames[0] if frames else b"", most=MAX_TENSORS)
    except ArenaError:
        return "refused"
    return "read"


TAKES: dict[str, Callable[[Frames], str]] = {
    "unpacks": _unpacks,
    "receives": _receives,
    "opens": _opens,
    "unseals": _unseals,
    "maps": _maps,
}
"""Everything on either side that is given bytes from a socket."""
