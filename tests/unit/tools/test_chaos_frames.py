"""Inputs of the frames campaign: any bytes are one, and the good messages survive the way there."""

from __future__ import annotations

from random import Random

from tests.builders.hostile_frames import TAKES, good_messages
from tools.chaos.frames import LONGEST_INPUT, MOST_FRAMES, packed, unpacked


def test_good_messages_fit_into_an_input_and_come_out_as_they_were() -> None:
    for reader in range(len(TAKES)):
        for message in good_messages():
            data = packed(reader, message)
            assert len(data) <= LONGEST_INPUT
            assert unpacked(data) == (reader, message)


def test_any_bytes_are_an_input() -> None:
    random = Random(0)
    for length in (*range(20), 300):
        _, frames = unpacked(random.randbytes(length))
        assert len(frames) <= MOST_FRAMES
        assert sum(map(len, frames)) <= length
