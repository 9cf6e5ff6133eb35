"""What goes over the pipes between a rank and its loader workers: tickets there, results back.

A ticket names the samples of one rank's part of a batch. A result says that they are in the ticket's slot of the arena,
or brings them; or it brings an error that a person can mend; or it tells which row a careful worker is about to begin.
numpy and the standard library only: loader workers import this module.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.data.plan import Refs

REF = np.dtype([("sample", "<i8"), ("epoch", "<i4"), ("source", "<i2"), ("skip", "<i2")])
"""One sample. `skip`: it is known to be unusable, and not to be touched."""
RESULT = struct.Struct("<QQIIB3x")
"""Position, bytes of arrays, bytes of JSON behind them, row, kind."""
BATCH, ERROR, ROW, LATER = 0, 1, 2, 3
"""LATER: an error of the network or the disk; the same ticket may succeed later."""
NO_SLOT = -1
_HEAD = struct.Struct("<QQIiH?x")


@dataclass(frozen=True)
class Ticket:
    """One rank's part of one batch."""

    position: int
    """Where the learner's batch begins."""
    first: int
    """Position of this rank's first sample."""
    bucket: int
    refs: NDArray[np.void]
    slot: int = NO_SLOT
    """Where in the arena the arrays go; NO_SLOT: over the pipe."""
    is_careful: bool = False
    """Tell each row before it is begun, so that it is known which one ends the worker."""
    whole: int = 0
    """Samples of the learner's batch. Stays with the rank, as does `mark`."""
    mark: int = 0
    """Of the learner's batch, see `training.data.plan.Batch`."""

    def pack(self) -> bytes:
        """Its bytes on the pipe."""
        head = _HEAD.pack(self.position, self.first, len(self.refs), self.slot, self.bucket, self.is_careful)
        return head + self.refs.tobytes()


def read_ticket(descriptor: int) -> Ticket | None:
    """The next ticket; none when the pipe is closed."""
    head = _read(descriptor, _HEAD.size)
    if head is None:
        return None
    position, first, count, slot, bucket, is_careful = _HEAD.unpack(head)
    body = _read(descriptor, count * REF.itemsize)
    if body is None:
        return None
    return Ticket(position, first, bucket, np.frombuffer(body, dtype=REF), slot, is_careful)


def as_records(refs: Refs) -> NDArray[np.void]:
    """The samples as a ticket has them."""
    records = np.zeros(len(refs), dtype=REF)
    records["source"], records["sample"], records["epoch"] = refs.source, refs.sample, refs.epoch
    return records


def _read(descriptor: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = os.read(descriptor, size - len(data))  # the pipe's end is the deadline: it closes with the rank
        if not more:
            return None
        data += more
    return data
