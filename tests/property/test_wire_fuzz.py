"""Hostile bytes: whatever arrives, the answer is a FrameError or a counted violation, and nothing else happens."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import sys
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from services.reception import MAX_VIOLATIONS, Reception
from services.wire.frames import Header, Kind, pack, unpack
from tests.builders.hostile_frames import METHODS, TAKES, good_messages, mutated

INPUTS = int(os.environ.get("GKR_CHAOS_STEPS", "10000"))
"""`make chaos` takes a million."""
MIB = 2**20


@pytest.mark.slow
@pytest.mark.timeout(60 + INPUTS // 500)
@pytest.mark.parametrize("name", TAKES)
def test_no_bytes_do_more_than_be_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Slow because there are many. S7: no crash, no import, no memory beyond what arrived; a failure names its seed."""
    caplog.set_level(logging.ERROR, logger="services")  # pytest keeps each line, and a peer that is dropped makes one
    take, messages = TAKES[name], good_messages()
    modules, before = set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen: Counter[str] = Counter()
    for seed in range(INPUTS):
        frames = mutated(Random(seed), messages)
        try:
            seen[take(frames)] += 1
        except Exception as error:
            raise AssertionError(f"input {seed}: {frames!r}") from error
    assert set(sys.modules) == modules
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 64 * MIB
    assert seen["refused"] > INPUTS // 10
    # The changes are small enough to reach what lies behind the checks.
    assert name == "unseals" or seen["read"] >= INPUTS // 400, seen


class _Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return os.putenv, ("GKR_BOMB", "went off")


def test_report_19_a_crafted_pickle_is_refused_at_the_header_and_never_evaluated() -> None:
    """https://github.com/sgl-project/sglang/issues/24618: an open TCP socket that unpickles is remote execution. Here:
    an error, a counter, and after three of them nobody listens to the connection."""
    bomb = pickle.dumps(_Bomb())
    here = Reception(METHODS, service="echo", incarnation=1, grant=4, max_batch=4)
    for frames in ([bomb], [bomb, bomb], [b"", bomb, bomb], pack(Header(kind=Kind.HELLO, identity="x"), bomb)):
        here.receive(b"thief", frames, now=0)
    stats = here.stats()

    assert (stats.violations, stats.banned) == (MAX_VIOLATIONS, 1)
    assert os.environ.get("GKR_BOMB") is None
    assert unpack(here.outbox[-1][1]).header.kind is Kind.GOAWAY
