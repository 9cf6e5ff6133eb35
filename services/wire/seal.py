"""Security level `token`: each message proves that it comes from a process of the same run, as it was sent, and once.

The first frame of a sealed message begins with a seal: a keyed hash over the rest of that frame, the sizes of the
others (tensors) and their checksum, and a number that grows by one. The key is made of the run's secret, a nonce of
each side and the direction, so nothing of another run, another connection or the other direction is accepted, and
nothing twice. A replica answers an unsealed HELLO with a sealed CHALLENGE that holds its nonce; everything after that
is sealed both ways.

Tensors have a checksum only (crc32), and nothing is encrypted: this is for networks whose owner is trusted to carry
bytes, not for the open internet. Tensors in shared memory are not looked at; they never leave the machine.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from services.wire.frames import Buffer, ErrorBody, FrameError, Header, Kind, decode_body, pack, unpack
from spec.sync_keys import SyncKeys

NONCE_BYTES = 16
SEAL = 0xC2
"""First byte of a seal; a header never begins with it, for it is a list."""
_FRAME = struct.Struct("<B3xIQ16s")
_TAG_BYTES = 16
_MOST_CHALLENGED = 8192
"""Connections with a key: as many as a replica has clients at most, and as many that are about to greet."""
_UNSEALED = "this replica serves the processes of its run only, and no token of that run came with the message"


def run_secret(keys: SyncKeys | None) -> bytes:
    """What the seals of a run's services are made with; empty if the run has no keys."""
    return blake2b(keys.token.encode(), person=b"gkr-services", digest_size=32).digest() if keys is not None else b""


def new_nonce() -> bytes:
    """This side's part of a connection's key."""
    return secrets.token_bytes(NONCE_BYTES)


class Seals:
    """One connection, both ways, as one of its sides has it. Used by one thread at a time."""

    def __init__(self, secret: bytes, *, client: bytes, replica: bytes, is_client: bool) -> None:
        """`client` and `replica`: the nonces."""
        up, down = (blake2b(way + client + replica, key=secret, digest_size=32).digest() for way in (b"up", b"down"))
        self._out, self._in = (_keyed(key) for key in ((up, down) if is_client else (down, up)))
        self._sent = self._received = 0

    def close(self, frames: Sequence[Buffer]) -> list[Buffer]:
        """The message with its seal in front."""
        self._sent += 1
        checksum = _checksum(frames)
        tag = _tag(self._out, frames, number=self._sent, checksum=checksum)
        return [_FRAME.pack(SEAL, checksum, self._sent, tag) + bytes(frames[0]), *frames[1:]]

    def open(self, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """The message without its seal. FrameError unless it is the next one of the other side, unchanged."""
        if not is_sealed(frames):
            raise FrameError(_UNSEALED)
        _, checksum, number, tag = _FRAME.unpack_from(frames[0])
        inner = _inner(frames)
        if not hmac.compare_digest(tag, _tag(self._in, inner, number=number, checksum=checksum)):
            raise FrameError("the seal does not fit the message: it is of another run, or was changed on its way")
        if number != self._received + 1:
            raise FrameError(f"message {number} follows message {self._received}: sent again, or one is missing")
        if checksum != _checksum(inner):
            raise FrameError("the checksum of the tensors is wrong: they were changed on their way")
        self._received = number
        return inner


class Gate:
    """The replica's side: the seals of all its connections, and the challenge that begins each."""

    def __init__(self, secret: bytes, *, is_connected: Callable[[bytes], bool]) -> None:
        self._secret, self._is_connected = secret, is_connected
        self._seals: OrderedDict[bytes, Seals] = OrderedDict()

    def open(self, route: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """What arrived, without its seal; none if it only asked for a challenge. FrameError for all else."""
        seals = self._seals.get(route)
        if seals is not None and is_sealed(frames):
            return seals.open(frames)
        if seals is not None or is_sealed(frames):
            raise FrameError(_UNSEALED)
        header = unpack(frames).header
        if header.kind is not Kind.HELLO or len(header.nonce) != NONCE_BYTES:
            raise FrameError(_UNSEALED)
        return None

    def challenge(self, route: bytes, frames: Sequence[Buffer]) -> list[Buffer]:
        """The answer to what `open` gave none for."""
        nonce = new_nonce()
        client = unpack(frames).header.nonce
        seals = self._seals[route] = Seals(self._secret, client=client, replica=nonce, is_client=False)
        if len(self._seals) > _MOST_CHALLENGED:
            self._forget_one()
        return seals.close(pack(Header(kind=Kind.CHALLENGE, nonce=nonce)))

    def close(self, route: bytes, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """What is sent; unsealed to those who have not asked for a challenge, and so only learn why not."""
        seals = self._seals.get(route)
        return frames if seals is None else seals.close(frames)

    def forget(self, route: bytes) -> None:
        """The connection is gone."""
        self._seals.pop(route, None)

    def _forget_one(self) -> None:
        """The oldest that did nothing with its challenge."""
        idle = next((route for route in self._seals if not self._is_connected(route)), None)
        if idle is not None:
            del self._seals[idle]


def accept_challenge(secret: bytes, frames: Sequence[Buffer], *, nonce: bytes) -> Seals:
    """The client's side of a connection, once the replica's challenge came. FrameError if it is none, or of another."""
    if not is_sealed(frames):
        raise FrameError(f"the replica does not prove that it is of this run; {_said(frames)}")
    header = unpack(_inner(frames)).header
    if header.kind is not Kind.CHALLENGE or len(header.nonce) != NONCE_BYTES:
        raise FrameError(f"{header.kind.name} where a challenge is due")
    seals = Seals(secret, client=nonce, replica=header.nonce, is_client=True)
    seals.open(frames)
    return seals


def _said(frames: Sequence[Buffer]) -> str:
    """What an unsealed answer says: it proves nothing and may be the explanation, such as another protocol version."""
    try:
        message = unpack(frames)
        if message.header.kind is Kind.ERROR:
            return f"it says: {decode_body(message.body, as_type=ErrorBody).message}"
    except FrameError as error:
        return str(error)
    return f"it sent {message.header.kind.name}"


def is_sealed(frames: Sequence[Buffer]) -> bool:
    """Whether the first frame begins with a seal."""
    return len(frames) > 0 and len(frames[0]) >= _FRAME.size and frames[0][0] == SEAL


def _inner(frames: Sequence[Buffer]) -> list[Buffer]:
    return [memoryview(frames[0])[_FRAME.size :], *frames[1:]]


def _checksum(frames: Sequence[Buffer]) -> int:
    """Of the tensors."""
    found = 0
    for frame in frames[1:]:
        found = zlib.crc32(frame, found)
    return found


def _keyed(key: bytes) -> blake2b:
    return blake2b(key=key, digest_size=_TAG_BYTES)


def _tag(keyed: blake2b, frames: Sequence[Buffer], *, number: int, checksum: int) -> bytes:
    found = keyed.copy()
    found.update(struct.pack(f"<QII{len(frames)}Q", number, checksum, len(frames), *map(len, frames)))
    found.update(frames[0])
    return found.digest()
