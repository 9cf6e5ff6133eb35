"""Messages as ZeroMQ frames: a typed header, a typed body, then one raw frame per tensor.

Frame 1 is a msgpack header whose first field is the protocol version; frame 2 is the msgpack body; the rest are the
bytes of contiguous arrays, in the order of the header's table. Whatever arrives is checked before any array exists:
number of frames, sizes, types, dtype from a fixed list, at most eight dimensions, and exactly as many bytes as the
shape says. Nothing is ever unpickled, evaluated or imported by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

VERSION = 1
MAX_FRAME_BYTES = 256 * 2**20
"""Of any frame. libzmq closes the connection of a peer that sends more, so both sides check before they send."""
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
"""Of ZeroMQ's own heartbeat, on both sides: a connection that is silent for so long is closed."""
MAX_HEADER_BYTES = 64 * 2**10
MAX_TENSORS = 16
MAX_DIMENSIONS = 8
MAX_RELEASED = 1024
FEATURE_ARENA = 1
"""This side and the other may see each other's memory: same machine."""

Buffer = bytes | bytearray | memoryview
DtypeName = Literal[
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"
]
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in DtypeName.__args__  # pyright: ignore[reportUnknownMemberType]
}

_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class Kind(IntEnum):
    """What a message is. Liveness is ZeroMQ's own heartbeat, so there is no ping here."""

    HELLO = 1
    """Client: who I am, and which service I expect here. First on every connection."""
    WELCOME = 2
    """Replica: the grant. Sending more than that many requests without an answer is a protocol error."""
    REQUEST = 3
    REPLY = 4
    ERROR = 5
    """A request that has no reply, or (request 0) a connection that is refused. Like a reply it returns one credit."""
    CREDIT = 6
    """Replica: the grant once more. Sent to idle clients, because sending is how a dead one is noticed."""
    CANCEL = 7
    """Client: nobody waits for this request any more. It is still answered once, which returns its credit."""
    GOAWAY = 8
    """Replica: send nothing more here; what is unanswered belongs to another replica."""
    BYE = 9
    """Client: forget me."""
    ARENA = 10
    """Either side: large tensors will lie there, if you can map it."""
    MAPPED = 11
    """Answer to ARENA: credit 1 if it is mapped, 0 if tensors have to travel as frames."""
    RELEASE = 12
    """Either side: these regions of your arena are read."""
    CHALLENGE = 13
    """Replica of level `token`, in answer to an unsealed HELLO: greet again, sealed with a key made of this nonce."""


class Priority(IntEnum):
    """Who waits for a request. Lower ones are computed when nothing higher waits, or when they waited long."""

    BLOCKING = 0
    """A step waits for it."""
    PREFETCH = 1
    EVALUATION = 2
    BACKGROUND = 3


Code = Literal[
    "refused", "internal", "expired", "cancelled", "protocol", "version", "method", "misdirected", "superseded", "busy"
]
"""refused: the service said no. internal: the service broke. expired, cancelled: not computed. protocol, version,
method: the client is wrong. misdirected: another replica lives here now. superseded: a newer client has this identity.
busy: too many clients."""


class TensorSpec(Struct, frozen=True, array_like=True):
    """One row of the header's table: what the raw frame at the same place holds."""

    name: _Name
    dtype: DtypeName
    shape: Annotated[tuple[_Count, ...], Meta(max_length=MAX_DIMENSIONS)]


class Header(Struct, frozen=True, array_like=True, kw_only=True):
    """First frame of every message. Fields are only ever appended, with defaults."""

    version: int = VERSION
    kind: Kind
    request: _Count = 0
    attempt: _Count = 0
    """REQUEST: 0 for the first sending; grows when the client sends the request again. HELLO: number of the client's
    connection; a lower one than the last was overtaken and is not heard."""
    method: Annotated[str, Meta(max_length=128)] = ""
    deadline_ms: _Count = 0
    """Milliseconds that the caller goes on waiting, from the moment of sending."""
    credit: _Count = 0
    """WELCOME, CREDIT: requests that may be unanswered at once."""
    identity: Annotated[str, Meta(max_length=128)] = ""
    """HELLO: the client's name, such as `east/rank-0`."""
    incarnation: _Count = 0
    """HELLO: start number of the client, grows with each start. WELCOME: of the replica."""
    service: Annotated[str, Meta(max_length=128)] = ""
    expected: _Count = 0
    """HELLO: incarnation of the replica that the client looks for; 0 takes any."""
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)] = ()
    features: _Count = 0
    """HELLO, WELCOME: what this side can do beyond the first version; see FEATURE_ARENA."""
    arena: Annotated[tuple[_Count, ...], Meta(max_length=5)] = ()
    """ARENA: process, descriptor, inode, size and nonce."""
    released: Annotated[tuple[_Count, ...], Meta(max_length=MAX_RELEASED)] = ()
    """RELEASE: numbers of regions."""
    credit_bytes: _Count = 0
    """WELCOME, CREDIT: bytes of requests that may be unanswered at once, beyond the first request; 0: any."""
    priority: Priority = Priority.BLOCKING
    """REQUEST: who waits for it."""
    nonce: Annotated[bytes, Meta(max_length=16)] = b""
    """HELLO, CHALLENGE: this side's part of the connection's key."""


class Nothing(Struct, frozen=True, kw_only=True):
    """Body of messages that say everything in their header."""


class ErrorBody(Struct, frozen=True, kw_only=True):
    """Body of an ERROR."""

    code: Code
    message: str
    hint: str = ""


class FrameError(Exception):
    """What arrived is not a message of this protocol."""


class VersionError(FrameError):
    """What arrived is of another protocol version."""


class _Peek(Struct, frozen=True, array_like=True):
    version: int


_peek = msgspec.msgpack.Decoder(_Peek)
_header = msgspec.msgpack.Decoder(Header)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}
_NOTHING = _encoder.encode(Nothing())

StructT = TypeVar("StructT", bound=Struct)


@dataclass(frozen=True)
class Message:
    """One message as it arrived: header checked, tensors checked, body not yet decoded."""

    header: Header
    body: Buffer
    tensors: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """The header's table and the raw frames. Raises FrameError for what cannot travel."""
    if len(tensors) > MAX_TENSORS:
        raise FrameError(f"{len(tensors)} tensors in one message; at most {MAX_TENSORS} can travel together")
    specs: list[TensorSpec] = []
    frames: list[memoryview] = []
    for name, array in tensors.items():
        if not 1 <= len(name) <= 128:
            raise FrameError(f"tensor name of {len(name)} characters; 1 to 128 can travel")
        wire = _DTYPES.get(array.dtype.name)
        if wire is None:
            raise FrameError(f"tensor {name!r} is {array.dtype}; only {', '.join(_DTYPES)} can travel")
        if array.ndim > MAX_DIMENSIONS:
            raise FrameError(f"tensor {name!r} has {array.ndim} dimensions; at most {MAX_DIMENSIONS} can travel")
        if array.nbytes > MAX_FRAME_BYTES:
            raise FrameError(f"tensor {name!r} is {array.nbytes} bytes; at most {MAX_FRAME_BYTES} travel in one frame")
        specs.append(TensorSpec(name, array.dtype.name, array.shape))  # pyright: ignore[reportArgumentType]
        flat = np.ascontiguousarray(array, dtype=wire).reshape(-1)
        frames.append(flat.view(np.uint8).data)
    return tuple(specs), frames


def encode_body(body: Struct) -> bytes:
    """Frame 2. Raises FrameError if it is too large to travel."""
    data = _encoder.encode(body)
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"message body is {len(data)} bytes; at most {MAX_FRAME_BYTES} travel in one frame")
    return data


def pack(header: Header, body: bytes = _NOTHING, *, raw: Sequence[Buffer] = ()) -> list[Buffer]:
    """All frames of one message, from parts that are encoded already."""
    return [_encoder.encode(header), body, *raw]


def request_bytes(body: Buffer, *, specs: Sequence[TensorSpec]) -> int:
    """What a request takes of the credit in bytes; both sides count it the same way."""
    if not specs:
        return len(body)
    return len(body) + sum(math.prod(one.shape) * _DTYPES[one.dtype].itemsize for one in specs)


def pack_error(*, request: int, code: Code, message: str, hint: str = "") -> list[Buffer]:
    """All frames of one ERROR."""
    body = ErrorBody(code=code, message=message[:4096], hint=hint[:4096])
    return pack(Header(kind=Kind.ERROR, request=request), _encoder.encode(body))


def unpack(frames: Sequence[Buffer]) -> Message:
    """Check and open one message. Raises FrameError, and nothing else, whatever the bytes are."""
    if not 2 <= len(frames) <= 2 + MAX_TENSORS:
        raise FrameError(f"{len(frames)} frames; a message has 2 to {2 + MAX_TENSORS}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise FrameError(f"header of {len(frames[0])} bytes; at most {MAX_HEADER_BYTES}")
    try:
        version = _peek.decode(frames[0]).version
        if version != VERSION:
            raise VersionError(f"protocol version {version}; this side speaks {VERSION}")
        header = _header.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"header: {error}") from error
    if len(frames) != 2 + len(header.tensors):
        raise FrameError(f"{len(header.tensors)} tensors announced, {len(frames) - 2} frames follow")
    tensors: dict[str, np.ndarray] = {}
    for spec, frame in zip(header.tensors, frames[2:], strict=True):
        wire = _DTYPES[spec.dtype]
        # Python integers: the product of eight large dimensions must not wrap around to a small one.
        if math.prod(spec.shape) * wire.itemsize != len(frame):
            raise FrameError(f"tensor {spec.name!r}: shape {spec.shape} of {spec.dtype} is not {len(frame)} bytes")
        if spec.name in tensors:
            raise FrameError(f"tensor {spec.name!r} is there twice")
        try:
            tensors[spec.name] = np.frombuffer(frame, dtype=wire).reshape(spec.shape)
        except ValueError as error:  # an empty array whose other dimensions numpy cannot hold
            raise FrameError(f"tensor {spec.name!r}: {error}") from error
    return Message(header, frames[1], tensors)


def decode_body(body: Buffer, *, as_type: type[StructT]) -> StructT:
    """The typed body. Raises FrameError if it does not fit the type."""
    decoder = _decoders.get(as_type)
    if decoder is None:
        decoder = _decoders[as_type] = msgspec.msgpack.Decoder(as_type)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"body is not a {as_type.__name__}: {error}") from error
