"""Memory that a rank and its loader workers share: workers fill a batch where the rank will read it.

One anonymous file per rank, cut into slots of one size. The rank alone gives slots out: free, leased with a ticket to
one worker, lent to whoever holds a view of the batch, and free again when the last view is gone. So a batch that is
kept keeps its slot, and a batch for which there is no slot goes over the pipe; nothing is ever overwritten and nobody
waits. A worker writes into a slot only between its ticket and its answer, which is why slots need no generations: the
slots of a worker that died are free once the process is surely gone.

All memory is taken at the start, or refused with what is needed and what there is: a page that cannot be had later
would be a bus error. The file has no name, so nothing of it outlives its processes, and the number of descriptors does
not grow with the batches. numpy and the standard library only: loader workers import this module.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.errors import ConfigError
from storage.memory import sealed_memory
from training.data.tickets import NO_SLOT

LEAST_BYTES = 1 << 16
"""Smaller batches go over the pipe, where a copy costs less than the bookkeeping."""
_PAGE = 4096
_MIB = 1 << 20


class ArenaFile:
    """The arena as it travels to a worker: with its descriptor."""

    def __init__(self, descriptor: int, *, slot_bytes: int, slots: int) -> None:
        self.descriptor, self.slot_bytes, self.slots = descriptor, slot_bytes, slots

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self.descriptor), self.slot_bytes, self.slots)

    def map(self) -> list[NDArray[np.uint8]]:
        """The slots; the descriptor is closed."""
        memory = mmap.mmap(self.descriptor, self.slot_bytes * self.slots)
        os.close(self.descriptor)
        return [_slot(memory, number, self.slot_bytes) for number in range(self.slots)]


class Arena:
    """The rank's side. Slots may be given back from any thread."""

    def __init__(self, *, slot_bytes: int, slots: int, available: int | None) -> None:
        """`available`: memory that may still be taken, if it is known. ConfigError if it is too little."""
        size = -(-slot_bytes // _PAGE) * _PAGE
        needed = size * slots
        if available is not None and needed > available:
            raise _too_little(needed, slots=slots, have=f"{available // _MIB} MiB are available")
        try:
            descriptor = sealed_memory("gkr-loader", size=needed)
            try:
                os.posix_fallocate(descriptor, 0, needed)
                self._memory = mmap.mmap(descriptor, needed)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            raise _too_little(needed, slots=slots, have=f"the system says: {error.strerror}") from error
        self.file = ArenaFile(descriptor, slot_bytes=size, slots=slots)
        self._free = deque(range(slots))

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    def take(self) -> int:
        """A free slot, or NO_SLOT."""
        try:
            return self._free.popleft()
        except IndexError:
            return NO_SLOT

    def give_back(self, slot: int) -> None:
        """Nobody has this slot any more; NO_SLOT is ignored."""
        if slot != NO_SLOT:
            self._free.append(slot)

    def lend(self, slot: int) -> NDArray[np.uint8]:
        """The slot's memory; it gives itself back when it and all arrays made of it are gone."""
        memory = _slot(self._memory, slot, self.file.slot_bytes)
        weakref.finalize(memory, self._free.append, slot).atexit = False
        return memory

    def close(self) -> None:
        """No more workers can be given it. The memory goes with the last batch that lies in it."""
        os.close(self.file.descriptor)
        del self._memory


def _slot(memory: mmap.mmap, number: int, size: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, dtype=np.uint8, count=size, offset=number * size)


def _arrived(descriptor: Any, slot_bytes: int, slots: int) -> ArenaFile:
    return ArenaFile(descriptor.detach(), slot_bytes=slot_bytes, slots=slots)


def _too_little(needed: int, *, slots: int, have: str) -> ConfigError:
    return ConfigError(
        f"the batches that a rank's loader workers prepare ahead need {-(-needed // _MIB)} MiB of memory"
        f" ({slots} of {-(-needed // slots // _MIB)} MiB each); {have}",
        hint="lower train.prefetch_batches or train.batch, take more ranks, or give the group more memory",
    )
