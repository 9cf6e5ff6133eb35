"""Messages as ZeroMQ frames: a head that says everything, then one raw frame per tensor if tensors are large.

The first frame is one msgpack document: the protocol version, a typed header, the body of the method, and the bytes of
small tensors one after the other, because each further frame costs more than a copy. Larger ones follow as the bytes of
contiguous arrays, in the order of the header's table. Whatever arrives is checked before any array exists: number of
frames, sizes, types, dtype from a fixed list, at most eight dimensions, and exactly as many bytes as the shape says.
Nothing is ever unpickled, evaluated or imported by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

VERSION = 2
MAX_FRAME_BYTES = 256 * 2**20
"""Of any frame. libzmq closes the connection of a peer that sends more, so both sides check before they send."""
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
"""Of ZeroMQ's own heartbeat, on both sides: a connection that is silent for so long is closed."""
INLINE_BYTES = 16 * 2**10
"""Tensors that are smaller together lie in the first frame."""
MAX_TENSORS = 16
MAX_DIMENSIONS = 8
MAX_HEAD_BYTES = 64 * 2**10
"""What a first frame holds at most beside its body."""
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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""To ask an array for the name of its dtype costs more than all else that is done with a small one."""

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
    """Either side, if it has nothing else to say: its envelope has the numbers of regions that are read."""
    CHALLENGE = 13
    """Replica of level `token`, in answer to an unsealed HELLO: greet again, sealed with a key made of this nonce."""


class Priority(IntEnum):
    """Who waits for a request. Lower ones are computed when nothing higher waits, or when they waited long."""

    BLOCKING = 0
    """A step waits for it."""
    PREFETCH = 1
    EVALUATION = 2
    BACKGROUND = 3

    __hash__ = int.__hash__  # Enum's own is written in Python, and tables of classes are asked several times a request


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
    """What a message is about. Fields are only ever appended, with defaults."""

    kind: Kind
    request: _Count = 0
    attempt: _Count = 0
    """REQUEST: 0 for the first sending; grows when the client sends the request again. HELLO: number of the client's
    connection; a lower one than the last was overtaken and is not heard."""
    method: Annotated[str, Meta(max_length=128)] = ""
    deadline_ms: _Count = 0
    """Milliseconds that the caller goes on waiting, from the moment of sending."""
    credit: _Count = 0
    """WELCOME, CREDIT: requests that may be unanswered at once. MAPPED: see there."""
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


class _Head(Struct, frozen=True, array_like=True):
    """The first frame."""

    version: int
    header: Header
    body: Raw
    inline: memoryview = memoryview(b"")


_peek = msgspec.msgpack.Decoder(_Peek)
_head = msgspec.msgpack.Decoder(_Head)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}
_NOTHING = _encoder.encode(Nothing())

StructT = TypeVar("StructT", bound=Struct)


class Message(Struct, frozen=True):
    """One message as it arrived: header checked, tensors checked, body not yet decoded."""

    header: Header
    body: Raw
    tensors: dict[str, np.ndarray] = {}


def encode_tensors(tensors: Mapping[str, np.ndarray]) -> tuple[tuple[TensorSpec, ...], list[Buffer]]:
    """The header's table and the bytes: copies of small arrays, views of others. FrameError for what cannot travel."""
    if not tensors:
        return (), []
    if len(tensors) > MAX_TENSORS:
        raise FrameError(f"{len(tensors)} tensors in one message; at most {MAX_TENSORS} can travel together")
    specs: list[TensorSpec] = []
    raw: list[Buffer] = []
    for name, array in tensors.items():
        if not (1 <= len(name) <= 128 and name.isprintable()):
            raise FrameError(f"tensor name {name[:128]!a}; 1 to 128 printable characters can travel")
        dtype = _NAMES.get(array.dtype) or array.dtype.name
        wire = _DTYPES.get(dtype)
        if wire is None:
            raise FrameError(f"tensor {name!r} is {array.dtype}; only {', '.join(_DTYPES)} can travel")
        if array.ndim > MAX_DIMENSIONS:
            raise FrameError(f"tensor {name!r} has {array.ndim} dimensions; at most {MAX_DIMENSIONS} can travel")
        if array.nbytes > MAX_FRAME_BYTES:
            raise FrameError(f"tensor {name!r} is {array.nbytes} bytes; at most {MAX_FRAME_BYTES} travel in one frame")
        specs.append(TensorSpec(name, dtype, array.shape))  # pyright: ignore[reportArgumentType]
        if array.nbytes < INLINE_BYTES:
            raw.append(array.astype(wire, copy=False).tobytes())
        else:
            raw.append(np.ascontiguousarray(array, dtype=wire).reshape(-1).view(np.uint8).data)
    return tuple(specs), raw


def encode_body(body: Struct) -> bytes:
    """The body. Raises FrameError if it holds what cannot travel, or too much."""
    try:
        data = _encoder.encode(body)
    except (UnicodeEncodeError, OverflowError) as error:  # half a surrogate pair in a text, or an endless number
        raise FrameError(f"the body cannot be encoded: {error}") from error
    if len(data) > MAX_FRAME_BYTES - MAX_HEAD_BYTES:
        raise FrameError(f"message body is {len(data)} bytes; at most {MAX_FRAME_BYTES} travel in one frame")
    return data


def pack(header: Header, body: bytes = _NOTHING, *, raw: Sequence[Buffer] = ()) -> list[Buffer]:
    """All frames of one message, from parts that are encoded already."""
    if not raw:
        return [_encoder.encode((VERSION, header, Raw(body)))]
    if sum(map(len, raw)) < INLINE_BYTES:
        return [_encoder.encode((VERSION, header, Raw(body), b"".join(raw)))]
    return [_encoder.encode((VERSION, header, Raw(body))), *raw]


def request_bytes(body: Buffer | Raw, *, specs: Sequence[TensorSpec]) -> int:
    """What a request takes of the credit in bytes; both sides count it the same way."""
    if not specs:
        return len(body)
    return len(body) + sum(map(_size, specs))


def pack_error(*, request: int, code: Code, message: str, hint: str = "") -> list[Buffer]:
    """All frames of one ERROR, whatever is in its texts."""
    body = ErrorBody(code=code, message=_encodable(message), hint=_encodable(hint))
    return pack(Header(kind=Kind.ERROR, request=request), _encoder.encode(body))


def _encodable(text: str) -> str:
    """File names and what people write may hold halves of surrogate pairs."""
    return text[:4096].encode(errors="replace").decode()


def unpack(frames: Sequence[Buffer]) -> Message:
    """Check and open one message. Raises FrameError, and nothing else, whatever the bytes are."""
    if not 1 <= len(frames) <= 1 + MAX_TENSORS:
        raise FrameError(f"{len(frames)} frames; a message has 1 to {1 + MAX_TENSORS}")
    try:
        head = _head.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(frames[0], error) from error
    if head.version != VERSION:
        raise VersionError(f"protocol version {head.version}; this side speaks {VERSION}")
    specs, inline = head.header.tensors, head.inline
    tensors: dict[str, np.ndarray] = {}
    if len(frames) == 1:
        begin = 0
        for spec in specs:
            end = begin + _size(spec)
            if end > len(inline):
                raise FrameError(f"tensors of {end} bytes and more announced, {len(inline)} bytes follow")
            tensors[spec.name] = _array(spec, inline[begin:end])
            begin = end
        if begin != len(inline):
            raise FrameError(f"tensors of {begin} bytes announced, {len(inline)} bytes follow")
    elif len(frames) != 1 + len(specs) or len(inline):
        raise FrameError(f"{len(specs)} tensors announced, {len(frames) - 1} frames and {len(inline)} bytes follow")
    else:
        for spec, frame in zip(specs, frames[1:], strict=True):
            if _size(spec) != len(frame):
                raise FrameError(f"tensor {spec.name!r}: shape {spec.shape} of {spec.dtype} is not {len(frame)} bytes")
            tensors[spec.name] = _array(spec, frame)
    if len(tensors) != len(specs):
        raise FrameError(f"a tensor is there twice: {', '.join(spec.name for spec in specs)}")
    return Message(head.header, head.body, tensors)


def _unreadable(frame: Buffer, error: Exception) -> FrameError:
    """Why the first frame is not one of ours: most often its version, which every version has in front."""
    try:
        version = _peek.decode(frame).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        version = VERSION
    if version != VERSION:
        return VersionError(f"protocol version {version}; this side speaks {VERSION}")
    return FrameError(f"head: {error}")


def _size(spec: TensorSpec) -> int:
    # Python integers: the product of eight large dimensions must not wrap around to a small one.
    return math.prod(spec.shape) * _DTYPES[spec.dtype].itemsize


def _array(spec: TensorSpec, buffer: Buffer) -> np.ndarray:
    """A view of exactly as many bytes as it takes, or a copy if they are not aligned."""
    wire = _DTYPES[spec.dtype]
    try:
        array = np.ndarray(spec.shape, wire, buffer)
    except ValueError as error:  # an empty array whose other dimensions numpy cannot hold
        raise FrameError(f"tensor {spec.name!r}: {error}") from error
    if wire.itemsize > 1 and not array.flags.aligned:  # small ones lie wherever they happen to
        array = array.copy()
        array.flags.writeable = False
    return array


def decode_body(body: Buffer | Raw, *, as_type: type[StructT]) -> StructT:
    """The typed body. Raises FrameError if it does not fit the type."""
    decoder = _decoders.get(as_type)
    if decoder is None:
        decoder = _decoders[as_type] = msgspec.msgpack.Decoder(as_type)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"body is not a {as_type.__name__}: {error}") from error
