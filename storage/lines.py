"""Whole lines at the end of a file that others append to as well. Standard library only."""

from __future__ import annotations

import errno
import os


class LineWriter:
    """One writer of lines, one write each.

    A disk that fills up takes a part of a line: the next line closes it first, so that no other line is spoilt.
    """

    def __init__(self) -> None:
        self._torn = False

    def write(self, descriptor: int, line: bytes) -> None:
        """Append a line, with its end, to a file that was opened for appending; OSError if not all of it fits."""
        line = b"\n" + line if self._torn else line
        self._torn = os.write(descriptor, line) < len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
