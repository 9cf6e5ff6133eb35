"""Wakes a thread that polls sockets: a pipe whose reading end sits in the poll set beside them."""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """`notify` from any thread makes `fd` readable until `drain`. Closing is safe against late notifications."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def notify(self) -> None:
        """Wake the poller. Never blocks."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            if not self._closed:
                os.write(self._write, b"x")

    def drain(self) -> None:
        """Take back all notifications so far; look at the inbox after this, not before."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        """Close both ends, once the poller is done."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
                os.close(self._write)
