"""Small facts about processes that the driver's side needs: die with the parent, and how a process ended."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import sys
from collections import deque
from contextlib import suppress

from spec.errors import UnreachableError

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h, glibc
_KEPT_BYTES = 32 * 2**20
PORTS = range(20_000, 30_000)
"""Above what Ray gives to its workers (10002 to 19999), below the node ports of Kubernetes (30000 to 32767) and what
Linux gives to connections (from 32768): one of those would be taken again before it is bound."""
_TRIES = 200
_KEPT_PORTS = 256
_KEEPERS: deque[int] = deque()
"""Descriptors of the sockets that keep ports: bound, never listening."""


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` when the parent thread ends (Linux). Call it in the child, first thing."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def keep_freed_memory() -> None:
    """Let malloc keep up to 32 MiB that were freed, for who takes and frees the same few megabytes over and over.

    It would give them back and fault every page in again, which costs as much as decoding an image. glibc only.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def describe_exit(code: int) -> str:
    """`SIGKILL` for -9, `exit 3` for 3 (subprocess convention)."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def free_port(host: str = "127.0.0.1") -> int:
    """A port for a process to come, which the system gives to nobody unasked.

    On Linux it is kept from everybody else who asks here, until its server listens: a socket stays bound to it, for the
    next 256 ports that this process asks for. The server must set SO_REUSEADDR before it binds, as servers do.
    Elsewhere it was free a moment ago, no more.
    """
    for _ in range(_TRIES):
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as keeper, suppress(OSError):
            keeper.bind((host, port))
            if sys.platform == "linux":
                # Only after the bind: another who asks here does not get it, a server that wants to share it does.
                keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _KEEPERS.append(keeper.detach())
                if len(_KEEPERS) > _KEPT_PORTS:
                    os.close(_KEEPERS.popleft())
            return port
    raise UnreachableError(
        f"{_TRIES} ports of {host} between {PORTS[0]} and {PORTS[-1]} are in use",
        hint="see what listens there (`ss -ltnp`), and whether this machine has the address at all",
    )
