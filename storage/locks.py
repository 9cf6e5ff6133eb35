"""Locks of open files (flock): the kernel releases them with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
import time

POLL_SECONDS = 0.02


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the lock if that can be done at once."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, *, seconds: float, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the lock; False if others have kept it for so long."""
    until = time.monotonic() + seconds
    while not try_lock(descriptor, kind):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True
