"""Cutting bodies into chunks and putting them together again, whatever arrives when."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.sync import carrier, chunks
from training.sync.chunks import Pace, Upload, chunk, crc_of

SMALL = 10


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Chunks of ten bytes, and of two elements where weights are fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", SMALL)
        patch.setattr(carrier, "_ELEMENTS", 2)
        yield


def put(upload: Upload, body: bytes, index: int) -> None:
    data = body[index * SMALL : (index + 1) * SMALL]
    for offset in range(0, len(data), 4):
        upload.write(index, offset=offset, piece=memoryview(data[offset : offset + 4]))
    upload.receive(index)


@given(body=st.binary(max_size=95), data=st.data())
@settings(deadline=None)
def test_chunks_in_any_order_and_twice_make_the_body(body: bytes, data: st.DataObject) -> None:
    upload = Upload(len(body), sha256=hashlib.sha256(body).hexdigest())
    assert upload.missing() == list(range(upload.count))
    order = data.draw(st.permutations([*range(upload.count), *range(upload.count)]))
    for index in order:
        put(upload, body, index)
    assert upload.missing() == []
    assert upload.verify()
    assert upload.data.tobytes() == body


def test_a_chunk_that_was_received_is_not_written_again() -> None:
    body = bytes(range(25))
    upload = Upload(len(body), sha256=hashlib.sha256(body).hexdigest())
    put(upload, body, 1)
    upload.write(1, offset=0, piece=memoryview(b"zzzz"))
    assert upload.missing() == [0, 2]
    put(upload, body, 0)
    put(upload, body, 2)
    assert upload.verify()


def test_a_body_with_another_digest_has_to_come_again() -> None:
    body, other = bytes(range(25)), bytes(range(1, 26))
    upload = Upload(len(body), sha256=hashlib.sha256(body).hexdigest())
    for index in range(3):
        put(upload, other, index)
    assert not upload.verify()
    assert upload.missing() == [0, 1, 2]
    for index in range(3):
        put(upload, body, index)
    assert upload.verify()


def test_verifying_too_early_keeps_nothing_wrong() -> None:
    body = bytes(range(25))
    upload = Upload(len(body), sha256=hashlib.sha256(body).hexdigest())
    put(upload, body, 0)
    assert not upload.verify()
    for index in range(3):
        put(upload, body, index)
    assert upload.verify()


@given(parts=st.lists(st.binary(max_size=33), max_size=5))
def test_chunks_of_several_arrays_are_those_of_one(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    cut = [chunk([memoryview(one) for one in parts], index) for index in range(-(-len(whole) // SMALL))]
    assert [b"".join(one) for one in cut] == [whole[at : at + SMALL] for at in range(0, len(whole), SMALL)]
    assert [crc_of(one) for one in cut] == [f"{zlib.crc32(b''.join(one)):08x}" for one in cut]


@given(lengths=st.lists(st.integers(0, 7), max_size=6))
def test_fetched_pieces_cover_the_ranges_once_and_in_order(lengths: list[int]) -> None:
    starts = np.cumsum([0, *(length + 3 for length in lengths)])
    ranges = [(int(start), length) for start, length in zip(starts, lengths, strict=False)]
    wanted = [at for start, length in ranges for at in range(start, start + length)]
    found: list[int] = []
    for position, pieces in carrier._cut(ranges):
        assert position == len(found)
        elements = [at for start, length in pieces for at in range(start, start + length)]
        assert 0 < len(elements) <= 2
        found += elements
    assert found == wanted


def test_a_pace_lets_through_no_more_than_its_rate() -> None:
    now = 100.0
    pace = Pace(50.0, clock=lambda: now)
    assert [pace.take(size) for size in (25, 25, 100)] == [0.0, 0.5, 1.0]
    now = 102.0
    assert pace.take(10) == 1.0
    now = 200.0
    assert (pace.take(50), pace.take(1)) == (0.0, 1.0)
    assert Pace(None).take(10**12) == 0.0
