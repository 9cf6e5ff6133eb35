"""Security level `token`: what is accepted, and everything that is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from services.wire.frames import (
    INLINE_BYTES,
    Buffer,
    FrameError,
    Header,
    Kind,
    Nothing,
    encode_body,
    encode_tensors,
    pack,
    unpack,
)
from services.wire.seal import Gate, Seals, accept_challenge, new_nonce, run_secret
from spec.sync_keys import SyncKeys

SECRET, OTHER = b"s" * 32, b"o" * 32
ROUTE = b"route"


def hello(nonce: bytes) -> list[Buffer]:
    return pack(Header(kind=Kind.HELLO, identity="rank-0", incarnation=1, service="echo", nonce=nonce))


def gate(secret: bytes = SECRET) -> Gate:
    return Gate(secret, is_connected=lambda _: True)


def meet(here: Gate, *, secret: bytes = SECRET, route: bytes = ROUTE) -> Seals:
    """The client's seals, after the challenge."""
    nonce = new_nonce()
    assert here.open(route, hello(nonce)) is None
    return accept_challenge(secret, here.challenge(route, hello(nonce)), nonce=nonce)


def request(number: int = 1, *, value: int = 3, size: int = 100) -> list[Buffer]:
    specs, raw = encode_tensors({"x": np.full(size, value, np.uint8)})
    header = Header(kind=Kind.REQUEST, request=number, tensors=specs)
    return pack(header, encode_body(Nothing()), raw=raw)


def as_bytes(frames: Sequence[Buffer]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def test_what_is_sealed_on_one_side_opens_on_the_other_both_ways() -> None:
    here = gate()
    client = meet(here)
    for number in (1, 2, 3):
        opened = here.open(ROUTE, client.close(request(number)))
        assert opened is not None
        assert unpack(opened).header.request == number
        assert as_bytes(client.open(here.close(ROUTE, request(number)))) == as_bytes(request(number))


@pytest.mark.parametrize("size", [100, INLINE_BYTES])
def test_a_message_that_was_changed_anywhere_is_refused(size: int) -> None:
    """Every byte of seal, head and tensor, one after the other."""
    here = gate()
    sealed = as_bytes(meet(here).close(request(size=size)))
    refused = 0
    for frame in range(len(sealed)):
        for place in range(len(sealed[frame])):
            changed = [bytearray(one) for one in sealed]
            changed[frame][place] ^= 1
            if frame == 0 and 1 <= place <= 3:
                continue  # padding of the seal, which nobody reads
            with pytest.raises(FrameError):
                here.open(ROUTE, changed)
            refused += 1
    assert refused > size
    assert here.open(ROUTE, sealed) is not None


def test_bytes_cannot_be_moved_between_head_and_tensors() -> None:
    here = gate()
    head, tensor = as_bytes(meet(here).close(request(size=INLINE_BYTES)))
    for frames in ([head], [head + tensor], [head, tensor, b""], [head + tensor[:1], tensor[1:]]):
        with pytest.raises(FrameError):
            here.open(ROUTE, frames)


def test_nothing_is_heard_twice_or_after_a_gap() -> None:
    here = gate()
    client = meet(here)
    first, second, third = (as_bytes(client.close(request(number))) for number in (1, 2, 3))
    assert here.open(ROUTE, first) is not None
    with pytest.raises(FrameError, match="message 1 follows message 1"):
        here.open(ROUTE, first)
    with pytest.raises(FrameError, match="message 3 follows message 1"):
        here.open(ROUTE, third)
    assert here.open(ROUTE, second) is not None


def test_a_recorded_connection_cannot_be_played_again() -> None:
    here = gate()
    nonce = new_nonce()
    here.open(ROUTE, hello(nonce))
    client = accept_challenge(SECRET, here.challenge(ROUTE, hello(nonce)), nonce=nonce)
    recorded = as_bytes(client.close(request()))

    assert here.open(b"thief", hello(nonce)) is None
    here.challenge(b"thief", hello(nonce))
    with pytest.raises(FrameError, match="the seal does not fit"):
        here.open(b"thief", recorded)


def test_an_answer_is_not_accepted_as_a_question() -> None:
    here = gate()
    meet(here)
    answer = as_bytes(here.close(ROUTE, request()))
    with pytest.raises(FrameError, match="the seal does not fit"):
        here.open(ROUTE, answer)


def test_another_runs_token_opens_nothing_on_either_side() -> None:
    with pytest.raises(FrameError, match="of another run"):
        meet(gate(), secret=OTHER)
    here = gate()
    meet(here)
    stranger = Seals(OTHER, client=new_nonce(), replica=new_nonce(), is_client=True)
    with pytest.raises(FrameError, match="of another run"):
        here.open(ROUTE, stranger.close(request()))


@pytest.mark.parametrize("frames", [request(), hello(b""), hello(b"short"), []])
def test_unsealed_messages_are_refused(frames: list[Buffer]) -> None:
    with pytest.raises(FrameError):
        gate().open(ROUTE, frames)


def test_no_unsealed_message_is_heard_once_a_connection_is_sealed() -> None:
    here = gate()
    meet(here)
    for frames in (request(), hello(new_nonce())):
        with pytest.raises(FrameError, match="no token"):
            here.open(ROUTE, frames)


def test_a_client_does_not_go_on_unsealed() -> None:
    welcome = pack(Header(kind=Kind.WELCOME, credit=8))
    with pytest.raises(FrameError, match="does not prove"):
        accept_challenge(SECRET, welcome, nonce=new_nonce())


def test_challenges_that_nobody_answers_are_forgotten() -> None:
    here = Gate(SECRET, is_connected=lambda route: route == ROUTE)
    client = meet(here)
    for number in range(10_000):
        nonce = new_nonce()
        here.challenge(f"{number}".encode(), hello(nonce))
    assert len(here._seals) <= 8192
    assert here.open(ROUTE, client.close(request())) is not None


def test_as_many_as_a_replica_takes_can_greet_while_as_many_are_connected() -> None:
    """A newcomer's key was the first to go when 4096 were connected, so the replica called its greeting unsealed."""
    connected = {f"{number}".encode() for number in range(4096)}
    here = Gate(SECRET, is_connected=connected.__contains__)
    for route in connected:
        meet(here, route=route)
    newcomers = [(f"new-{number}".encode(), meet(here, route=f"new-{number}".encode())) for number in range(100)]
    for route, seals in newcomers:
        assert here.open(route, seals.close(hello(b""))) is not None


def test_the_secret_is_made_of_the_runs_token_and_absent_without_keys(tmp_path: Path) -> None:
    one, two = (run_secret(SyncKeys(folder=tmp_path, token=token)) for token in ("a", "b"))

    assert len(one) == 32
    assert one != two
    assert run_secret(None) == b""
