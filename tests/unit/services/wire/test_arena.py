"""Shared memory between two processes: regions are given out once, read where they lie, and nothing is left behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from services.wire.arena import (
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
from storage.memory import sealed_memory

MIB = 1 << 20


def test_what_one_side_writes_the_other_reads_in_place() -> None:
    arena = SendArena(MIB)
    reader = ReadArena(arena.address)
    places = arena.write([b"abc", bytes(100_000), b""])
    assert places is not None
    assert [bytes(reader.read(place)) for place in places] == [b"abc", bytes(100_000), b""]
    assert reader.read(places[0]).readonly
    arena.close()
    assert bytes(reader.read(places[0])) == b"abc"


def test_regions_are_never_given_out_twice_and_come_back_whole() -> None:
    """Many sizes in random order: no two regions in use overlap, and in the end all is free again."""
    generator = random.Random(3)
    arena = SendArena(MIB)
    used: dict[int, tuple[int, int]] = {}
    refused = 0
    for _ in range(3000):
        if used and generator.random() < 0.48:
            number = generator.choice(list(used))
            arena.release(number)
            del used[number]
            continue
        size = generator.choice([0, 1, 64, 1000, 60_000, 200_000])
        places = arena.write([bytes(size)])
        if places is None:
            refused += 1
            continue
        (place,) = places
        begin, end = place.offset - 64, place.offset + place.size
        assert all(end <= start or begin >= stop for start, stop in used.values())
        used[place.number] = (begin, end)
    assert refused
    for number in used:
        arena.release(number)
    assert arena.used == 0
    assert arena.write([bytes(MIB - 128)]) is not None


def test_what_does_not_fit_is_not_written_at_all() -> None:
    arena = SendArena(MIB)
    assert arena.write([bytes(MIB // 2), bytes(MIB)]) is None
    assert arena.used == 0
    places = arena.write([bytes(MIB // 2)])
    assert places is not None
    assert arena.write([bytes(MIB // 2)]) is None
    arena.release(places[0].number)
    arena.release(places[0].number)
    assert arena.write([bytes(MIB // 2)]) is not None


def test_what_is_computed_into_a_region_is_read_there_and_not_copied() -> None:
    arena = SendArena(MIB)
    reader = ReadArena(arena.address)
    room = arena.room(200_000)
    assert room is not None
    image = room.view(np.float32).reshape(100, 500)
    image[:] = 5
    (place,) = arena.write([image.reshape(-1).view(np.uint8).data]) or []
    image[1, 1] = 7  # where the other side sees it: these are the same bytes
    seen = np.frombuffer(reader.read(place), dtype=np.float32).reshape(100, 500)
    assert seen[0, 0] == 5
    assert seen[1, 1] == 7


def test_a_region_is_free_when_neither_side_has_it() -> None:
    """Sent twice, as an answer that was asked for again is; read twice; and kept by whoever computed it."""
    arena = SendArena(MIB)
    room = arena.room(200_000)
    assert room is not None
    tensor = room.view(np.uint16)
    del room
    frame = tensor.view(np.uint8).data
    (first,), (second,) = arena.write([frame]) or [], arena.write([frame]) or []
    assert first == second
    for _ in range(5):  # more often than it was sent: the other side may say what it likes
        arena.release(first.number)
    assert arena.used == 1
    (third,) = arena.write([frame]) or []
    del tensor, frame
    assert arena.used == 1
    arena.release(third.number)
    assert arena.used == 0
    assert arena.room(MIB) is None


def test_a_part_of_a_room_is_copied() -> None:
    """Its number stands in front of the room, and not in front of the part."""
    arena = SendArena(MIB)
    reader = ReadArena(arena.address)
    room = arena.room(200_000)
    assert room is not None
    room[:] = 1
    (place,) = arena.write([room[1000:].data]) or []
    room[:] = 2
    assert set(reader.read(place)) == {1}


def test_rooms_outlive_their_arena_and_there_are_none_after_it() -> None:
    arena = SendArena(MIB)
    room = arena.room(1000)
    assert room is not None
    arena.close()
    room[:] = 5
    assert room.sum() == 5000
    assert arena.room(1000) is None


def test_a_region_that_was_reused_is_found() -> None:
    arena = SendArena(MIB)
    reader = ReadArena(arena.address)
    (first,) = arena.write([b"first"]) or []
    arena.release(first.number)
    arena.write([b"other"])
    with pytest.raises(ArenaError, match=f"region {first.number} is {first.number + 1}"):
        reader.read(first)


@pytest.mark.parametrize("change", [{"offset": 0}, {"offset": 65}, {"offset": MIB}, {"size": MIB}, {"size": 2**60}])
def test_places_outside_the_arena_are_refused(change: dict[str, int]) -> None:
    arena = SendArena(MIB)
    (place,) = arena.write([b"x"]) or []
    with pytest.raises(ArenaError, match="not in an arena"):
        ReadArena(arena.address).read(place._replace(**change))


def test_another_file_process_or_size_is_refused() -> None:
    arena = SendArena(MIB)
    with open(os.devnull) as other, pytest.raises((ArenaError, OSError)):  # noqa: PTH123
        ReadArena(arena.address._replace(descriptor=other.fileno()))
    with pytest.raises(OSError, match="No such file"):
        ReadArena(arena.address._replace(pid=2**22 + 1))
    with pytest.raises(ArenaError, match="bytes"):
        ReadArena(arena.address._replace(size=2 * MIB))
    with pytest.raises(ArenaError, match="descriptor"):
        ReadArena(arena.address._replace(inode=1))


def test_an_arena_too_small_to_be_one_is_refused() -> None:
    """Its four bytes were read as a number of eight, which ended the thread that serves everybody."""
    file = sealed_memory("gkr-arena", size=4)
    with closing(open(file, "rb")), pytest.raises(ArenaError, match="has 4 bytes"):  # noqa: PTH123
        ReadArena(ArenaAddress(os.getpid(), file, os.fstat(file).st_ino, 4, 0))


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    file = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    address = ArenaAddress(os.getpid(), file, os.fstat(file).st_ino, MIB, 0)
    with closing(open(file, "rb")), ThreadPoolExecutor(1) as pool:  # noqa: PTH123
        refused = pool.submit(ReadArena, address)
        try:
            with pytest.raises(ArenaError, match="pipe"):
                refused.result(20)
        finally:
            os.close(os.open(tmp_path / "pipe", os.O_RDWR))  # lets go of one that waits


def test_an_arena_ends_with_its_process() -> None:
    """Report 6 (mosaicml/streaming#781): a stale name kept the next run from starting. There are no names here."""
    code = (
        "import os, signal; from services.wire.arena import SendArena; arena = SendArena(1 << 20);"
        "print(arena.address.pid, arena.address.descriptor, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    pid, descriptor = found.stdout.split()
    assert not os.path.exists(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH110
    assert [name for name in os.listdir("/dev/shm") if "gkr" in name] == []  # noqa: PTH208


def test_envelopes() -> None:
    places = [Place(1, 64, 5), Place(2**60, 128, 0)]
    packed = pack_envelope(places)
    assert is_envelope(packed)
    assert not is_envelope(b"\x9e\x01")
    assert not is_envelope(b"")
    assert unpack_envelope(packed + b"rest", most=16) == (places, (), len(packed))
    both = pack_envelope(places, released=(7, 2**63))
    assert unpack_envelope(both + b"rest", most=16) == (places, (7, 2**63), len(both))
    released = range(MAX_RELEASED + 1)
    many = pack_envelope([], released=released[1:])
    assert unpack_envelope(many, most=16) == ([], tuple(released[1:]), len(many))
    for broken in (packed[:3], packed[:-1], both[:-1], b"\xc1\0\0\0", pack_envelope(places * 10)):
        with pytest.raises(ArenaError):
            unpack_envelope(broken, most=16)
    with pytest.raises(ArenaError):
        unpack_envelope(pack_envelope([], released=released), most=16)
