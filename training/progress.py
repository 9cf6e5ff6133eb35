"""The progress page: what a rank is doing, readable by its agent without asking it.

One small file per rank, mapped into memory; the rank writes it at each committed step and phase change, the agent reads
it at any time. The page survives the SIGKILL of its writer, so the last committed step is known exactly. A counter that
is odd while a write is under way lets the reader see a torn page and read again.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_LAYOUT = struct.Struct("<8sQqqqqqqd16s")
_MAGIC = b"GKRPAGE1"
NOT_RESTORED = -1
"""Position of a rank that has not taken up its state yet."""


@dataclass(frozen=True, slots=True)
class Page:
    """One reading."""

    epoch: int
    pid: int
    step: int
    """Inner steps committed, counted over all attempts that count."""
    position: int
    """Samples of the learner's order consumed by committed steps; NOT_RESTORED before the rank took up its state."""
    samples_run: int
    """Samples of steps committed in this attempt."""
    steps_run: int
    """Steps committed in this attempt."""
    monotonic: float
    """CLOCK_MONOTONIC of the last write; one clock for all processes of a machine."""
    phase: str


class ProgressWriter:
    """Owned by one rank. Not safe for several threads."""

    def __init__(self, path: Path, *, epoch: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file each time: a rank of an older epoch that is not quite dead still writes into the old one.
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(bytes(_LAYOUT.size))
        draft.replace(path)
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), _LAYOUT.size)
        self._epoch, self._sequence = epoch, 0
        self.step = self.samples_run = self.steps_run = 0
        self.position = NOT_RESTORED
        self.phase("start")

    def phase(self, name: str) -> None:
        """Say what the rank is doing now (at most 16 bytes)."""
        self._phase = name.encode()[:16]
        self._write()

    def restored(self, *, step: int, position: int) -> None:
        """Take up the counters of a checkpoint."""
        self.step, self.position = step, position
        self._write()

    def committed(self, *, samples: int) -> None:
        """One more step is committed."""
        self.step += 1
        self.steps_run += 1
        self.position += samples
        self.samples_run += samples
        self._write()

    def _write(self) -> None:
        self._sequence += 2
        counters = (self._epoch, os.getpid(), self.step, self.position, self.samples_run, self.steps_run)
        self._map[8:16] = (self._sequence - 1).to_bytes(8, "little")
        _LAYOUT.pack_into(self._map, 0, _MAGIC, self._sequence - 1, *counters, time.monotonic(), self._phase)
        self._map[8:16] = self._sequence.to_bytes(8, "little")

    def close(self) -> None:
        """Unmap; the file stays for its reader."""
        self._map.close()
        self._file.close()

    def __enter__(self) -> ProgressWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_page(path: Path) -> Page | None:
    """The page as it is now; none if it does not exist, is empty, or its writer died in the middle of a write."""
    for _ in range(20):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != _LAYOUT.size:
            return None
        magic, sequence, epoch, pid, step, position, samples_run, steps_run, monotonic, phase = _LAYOUT.unpack(data)
        if magic == _MAGIC and sequence % 2 == 0:
            return Page(epoch, pid, step, position, samples_run, steps_run, monotonic, phase.rstrip(b"\0").decode())
    return None
