"""Large tensors of a connection lie in shared memory once both sides agreed; else they travel as frames."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest

from services.wire import lane as module
from services.wire.arena import ARENA_BYTES, ENVELOPE, pack_envelope
from services.wire.frames import Buffer, FrameError, Header, Kind, Message, encode_tensors, pack, unpack
from services.wire.lane import LANE_KINDS, Lane

LARGE = np.arange(100_000, dtype=np.float32)


def message(array: np.ndarray) -> list[Buffer]:
    specs, raw = encode_tensors({"x": array})
    return pack(Header(kind=Kind.REPLY, request=1, tensors=specs), raw=raw)


def deliver(sender: Lane, receiver: Lane, messages: Sequence[Sequence[Buffer]]) -> tuple[list[Message], int]:
    """Carry messages, and what is answered to them, until nobody has anything to say; messages and bytes of frames."""
    found: list[Message] = []
    size = 0
    for frames in messages:
        size += sum(map(len, frames))
        one = unpack(receiver.opened([bytes(frame) for frame in frames]))
        if one.header.kind not in LANE_KINDS:
            found.append(one)
            continue
        for answer in receiver.handle(one.header):
            assert sender.handle(unpack(answer).header) == []
    return found, size


def agreed(*, arena_bytes: int = ARENA_BYTES) -> tuple[Lane, Lane]:
    sender, receiver = Lane(shared=True, arena_bytes=arena_bytes), Lane(shared=True)
    deliver(sender, receiver, sender.outgoing(message(LARGE)))
    return sender, receiver


def test_the_first_large_message_travels_as_frames_and_the_next_in_shared_memory() -> None:
    sender, receiver = Lane(shared=True), Lane(shared=True)
    (first,), size = deliver(sender, receiver, sender.outgoing(message(LARGE)))
    assert size > LARGE.nbytes
    (second,), size = deliver(sender, receiver, sender.outgoing(message(LARGE + 1)))
    assert size < 500
    np.testing.assert_array_equal(first.tensors["x"], LARGE)
    np.testing.assert_array_equal(second.tensors["x"], LARGE + 1)
    assert not second.tensors["x"].flags.writeable


def test_a_region_is_used_again_only_when_nobody_looks_at_it_any_more() -> None:
    """Report 14 (pytorch#973): whoever keeps a view keeps its memory, and only that."""
    sender, receiver = agreed(arena_bytes=4 * LARGE.nbytes)
    (kept,), _ = deliver(sender, receiver, sender.outgoing(message(LARGE)))
    view = kept.tensors["x"][10:20]
    del kept
    for turn in range(50):
        (one,), size = deliver(sender, receiver, sender.outgoing(message(LARGE + turn)))
        assert size < 500, "the arena ran full"
        assert one.tensors["x"][0] == turn
        del one
        gc.collect()
        deliver(receiver, sender, receiver.releases())
        assert view.tolist() == LARGE[10:20].tolist()
    assert receiver.releases() == ()
    del view
    gc.collect()
    assert len(receiver.releases()) == 1


def test_an_arena_that_is_full_sends_frames() -> None:
    sender, receiver = agreed(arena_bytes=3 * LARGE.nbytes)
    held = [deliver(sender, receiver, sender.outgoing(message(LARGE + n))) for n in range(4)]
    assert [size < 500 for _, size in held] == [True, True, False, False]
    assert [one.tensors["x"][0] for (one,), _ in held] == [0, 1, 2, 3]


@pytest.mark.parametrize("case", ["small", "another machine", "cannot map", "no memory"])
def test_everything_else_travels_as_frames(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    sender, receiver = Lane(shared=case != "another machine"), Lane(shared=case != "cannot map")
    if case == "no memory":
        monkeypatch.setattr(module, "SendArena", refuse)
    array = LARGE[:10] if case == "small" else LARGE
    for _ in range(3):
        (one,), size = deliver(sender, receiver, sender.outgoing(message(array)))
        np.testing.assert_array_equal(one.tensors["x"], array)
        assert size > array.nbytes


def test_nonsense_about_arenas_is_refused() -> None:
    sender, receiver = agreed()
    (frame,) = sender.outgoing(message(LARGE))[0]
    assert frame[0] == ENVELOPE
    with pytest.raises(FrameError, match="without an arena"):
        Lane(shared=True).opened([frame])
    with pytest.raises(FrameError, match="without an arena"):
        receiver.opened([frame, b"one more"])
    broken = bytearray(frame)
    broken[4] ^= 0xFF
    with pytest.raises(FrameError, match="region"):
        receiver.opened([broken])
    with pytest.raises(FrameError, match="does not concern arenas"):
        sender.handle(Header(kind=Kind.BYE))
    for address in ((), (1,), (1, 2, 3, 4), (2**50, 1, 1, 1)):
        (answer,) = Lane(shared=True).handle(Header(kind=Kind.ARENA, arena=address))
        assert unpack(answer).header.credit == 0
    released = [pack_envelope([], released=[1, 2, 2**60]) + bytes(pack(Header(kind=Kind.RELEASE))[0])]
    for lane in (Lane(shared=True), sender):
        assert unpack(lane.opened(released)).header.kind is Kind.RELEASE
        assert lane.handle(Header(kind=Kind.RELEASE)) == []


def test_what_was_read_is_told_with_the_next_message_whatever_it_is() -> None:
    sender, receiver = agreed()
    (one,), _ = deliver(sender, receiver, sender.outgoing(message(LARGE)))
    assert receiver.releases() == ()
    del one
    gc.collect()
    (request,) = receiver.outgoing(pack(Header(kind=Kind.REQUEST, request=2)))
    assert receiver.releases() == ()
    assert sender.regions == 1
    assert unpack(sender.opened(request)).header.request == 2
    assert sender.regions == 0


def test_tensors_stay_readable_after_the_connection_is_gone() -> None:
    sender, receiver = agreed()
    (one,), _ = deliver(sender, receiver, sender.outgoing(message(LARGE)))
    sender.close()
    receiver.close()
    np.testing.assert_array_equal(one.tensors["x"], LARGE)
