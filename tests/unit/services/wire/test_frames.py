"""Frames: what arrives is checked before anything is made of it."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.wire.frames import (
    INLINE_BYTES,
    MAX_DIMENSIONS,
    MAX_TENSORS,
    VERSION,
    Buffer,
    ErrorBody,
    FrameError,
    Header,
    Kind,
    TensorSpec,
    VersionError,
    decode_body,
    encode_body,
    encode_tensors,
    pack,
    pack_error,
    unpack,
)
from services.wire.messages import EncodeArgs

DTYPES = ["bool", "uint8", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"]


def message(tensors: dict[str, np.ndarray]) -> list[Buffer]:
    specs, raw = encode_tensors(tensors)
    body = encode_body(EncodeArgs(captions=["a seven"]))
    return pack(Header(kind=Kind.REQUEST, request=1, method="encode", tensors=specs), body, raw=raw)


def with_table(row: object, data: bytes, *, inline: bool) -> list[Buffer]:
    """A message whose table has one row that our own encoder would not write."""
    version, header, body = msgspec.msgpack.decode(pack(Header(kind=Kind.REQUEST, request=1))[0])
    header[Header.__struct_fields__.index("tensors")] = [row]
    if inline:
        return [msgspec.msgpack.encode([version, header, body, data])]
    return [msgspec.msgpack.encode([version, header, body]), data]


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=MAX_DIMENSIONS))
def test_any_array_comes_back_as_it_was_sent(dtype: str, shape: list[int]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.int64).astype(dtype).reshape(shape)

    tensor = unpack(message({"x": array})).tensors["x"]

    assert tensor.dtype == array.dtype
    np.testing.assert_array_equal(tensor, array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, INLINE_BYTES])
def test_arrays_can_be_computed_with_wherever_their_bytes_lie(dtype: str, size: int) -> None:
    """Small ones share a frame, in which they lie at any address; others have a frame each."""
    arrays = {"odd": np.ones(3, np.uint8), "x": np.ones(size, dtype), "more": np.ones((2, 3), np.float64)}

    frames = message(arrays)
    found = unpack([bytes(frame) for frame in frames]).tensors

    assert len(frames) == (1 if size == 3 else 4)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].flags.aligned
        assert not found[name].flags.writeable


def test_an_array_that_is_not_contiguous_travels_by_value() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3].T

    np.testing.assert_array_equal(unpack(message({"x": array})).tensors["x"], array)


def test_a_big_endian_array_arrives_with_the_same_values() -> None:
    array = np.arange(5, dtype=">f4")

    np.testing.assert_array_equal(unpack(message({"x": array})).tensors["x"], array)


def test_the_body_comes_back_typed() -> None:
    assert decode_body(unpack(message({})).body, as_type=EncodeArgs) == EncodeArgs(captions=["a seven"])


def test_half_a_surrogate_pair_cannot_be_sent_and_does_not_keep_an_error_from_being_told() -> None:
    """As captions have them that were cut in JSON, and file names that are not UTF-8."""
    with pytest.raises(FrameError, match="cannot be encoded"):
        encode_body(EncodeArgs(captions=["a seven \ud83d"]))
    (frame,) = pack_error(request=1, code="refused", message="no file \udcff.png", hint="\udcff")
    assert decode_body(unpack([frame]).body, as_type=ErrorBody).message == "no file ?.png"


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"captions": [1]}), b"\x91" * 10_000])
def test_a_body_of_another_type_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        decode_body(body, as_type=EncodeArgs)


def test_another_protocol_version_is_named_whatever_follows_it() -> None:
    with pytest.raises(VersionError, match=f"protocol version 9; this side speaks {VERSION}"):
        unpack([msgspec.msgpack.encode([9, {"quite": "another header"}]), b"\x80"])
    with pytest.raises(VersionError, match="protocol version 1;"):
        unpack([msgspec.msgpack.encode([1, int(Kind.HELLO), 0, 0, ""]), b"\x80"])


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("row", "data", "reason"),
    [
        (["x", "float32", [3]], b"12345678", "is not 8 bytes|of 12 bytes and more announced, 8"),
        (["x", "float32", [2]], b"123456789012", "is not 12 bytes|of 8 bytes announced, 12"),
        (["x", "float32", [2**31, 2**31, 2**2]], b"", "is not 0 bytes|more announced, 0 bytes"),
        (["x", "float32", [-1]], b"1234", "head"),
        (["x", "object", [1]], b"12345678", "head"),
        (["x", "float32", [1] * (MAX_DIMENSIONS + 1)], b"1234", "head"),
        (["x", "float32", [2**60]], b"", "head"),
        (["", "uint8", [1]], b"1", "head"),
        (["x" * 200, "uint8", [1]], b"1", "head"),
        ("x", b"1", "head"),
    ],
)
def test_a_table_that_does_not_fit_its_bytes_is_refused(row: object, data: bytes, reason: str, inline: bool) -> None:
    with pytest.raises(FrameError, match=reason):
        unpack(with_table(row, data, inline=inline))


def test_more_bytes_or_frames_than_announced_are_refused() -> None:
    frames = message({"x": np.zeros(INLINE_BYTES)})
    with pytest.raises(FrameError, match="1 tensors announced, 2 frames and 0 bytes follow"):
        unpack([*frames, b"more"])
    with pytest.raises(FrameError, match="1 tensors announced, 1 frames and 8 bytes follow"):
        unpack([*message({"x": np.zeros(1)}), b"more"])
    version, header, body = msgspec.msgpack.decode(message({})[0])
    with pytest.raises(FrameError, match="of 0 bytes announced, 4 bytes follow"):
        unpack([msgspec.msgpack.encode([version, header, body, b"more"])])


def test_too_many_tensors_are_refused_on_both_sides() -> None:
    with pytest.raises(FrameError, match="17 tensors"):
        encode_tensors({str(number): np.zeros(1) for number in range(MAX_TENSORS + 1)})
    with pytest.raises(FrameError, match="frames"):
        unpack([b""] * (3 + MAX_TENSORS))


def test_a_head_of_endless_depth_is_refused() -> None:
    with pytest.raises(FrameError, match="head"):
        unpack([b"\x91" * 100_000])


def test_an_array_of_python_objects_cannot_be_sent() -> None:
    with pytest.raises(FrameError, match="only bool"):
        encode_tensors({"x": np.array([object()])})


@pytest.mark.parametrize("name", ["", "x" * 129, "half a pair \ud83d", "two\nlines"])
def test_a_name_that_cannot_travel_is_refused_before_the_message_is_sent(name: str) -> None:
    with pytest.raises(FrameError, match="printable characters"):
        encode_tensors({name: np.zeros(1)})


def test_a_name_cannot_be_there_twice() -> None:
    header = Header(kind=Kind.REPLY, tensors=(TensorSpec("x", "uint8", (1,)), TensorSpec("x", "uint8", (1,))))

    with pytest.raises(FrameError, match="twice"):
        unpack(pack(header, b"\x80", raw=[b"1", b"2"]))


def test_damaged_frames_are_refused_or_read_and_nothing_else_happens() -> None:
    """Twenty thousand messages with bytes changed, cut, repeated or replaced."""
    chance = random.Random(0)
    original = [
        bytes(frame) for frame in message({"x": np.arange(6, dtype=np.float32), "y": np.zeros((2, 3), np.uint8)})
    ]
    read = 0
    for _ in range(20_000):
        frames: list[Buffer] = list(original)
        place = chance.randrange(len(frames))
        damaged = bytearray(frames[place])
        match chance.randrange(4):
            case 0:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            case 1:
                del damaged[chance.randrange(len(damaged)) :]
            case 2:
                damaged = bytearray(chance.randbytes(chance.randrange(64)))
            case _:
                damaged += damaged[: chance.randrange(len(damaged))]
        frames[place] = bytes(damaged)
        try:
            found = unpack(frames)
            decode_body(found.body, as_type=EncodeArgs)
        except FrameError:
            continue
        read += 1
        assert sum(tensor.nbytes for tensor in found.tensors.values()) <= sum(map(len, frames))
    assert 0 < read < 20_000


def test_ends_of_small_arrays_cannot_reach_into_others() -> None:
    specs = [["x", "uint8", [2**53, 2**10]], ["y", "uint8", [0]]]
    version, header, body = msgspec.msgpack.decode(pack(Header(kind=Kind.REQUEST, request=1))[0])
    header[Header.__struct_fields__.index("tensors")] = specs
    with pytest.raises(FrameError, match="and more announced, 3 bytes"):
        unpack([msgspec.msgpack.encode([version, header, body, b"abc"])])
