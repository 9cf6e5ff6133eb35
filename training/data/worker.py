"""A loader worker: prepares one rank's part of a batch for each position it is handed, in a process of its own.

The forkserver preloads this module, so it imports numpy and the standard library only: no torch, no pydantic. A
ticket on its pipe is a position; a result is a header and a body (`training.data.batch`), or the error that a person
can mend. What a sample looks like depends on (seed, learner, position) and the dataset alone, never on which worker
prepares it, how often, or beside what. The worker ends when its ticket pipe closes and is killed by the kernel when
its forkserver goes, which goes when the rank goes; nothing of it has a name on disk.
"""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
from numpy.random import Generator, Philox

from spec.errors import DataError
from spec.shard_bytes import Shape
from training.data.batch import LocalBatch, shapes_of, to_bytes, to_unit
from training.data.order import sample_ids
from training.data.reader import ShardFile, SplitReader
from training.processes import die_with_parent

TICKET = struct.Struct("<Q")
RESULT = struct.Struct("<QQB7x")
RESULT_BATCH, RESULT_ERROR = 0, 1
TimeDistribution = Literal["uniform", "logit-normal"]
_WRITEV_PARTS = 512


@dataclass(frozen=True)
class Work:
    """Everything that decides what a position holds for one rank. Travels to the worker, so plain values only."""

    shards: tuple[ShardFile, ...]
    shape: Shape
    manifest_digest: str
    seed: int
    learner: str
    batch: int
    """Samples of the learner's whole batch."""
    first: int
    """Where this rank's slice of the batch begins."""
    count: int
    """Samples of this rank's slice."""
    condition_dropout: float
    time_distribution: TimeDistribution
    is_text: bool = False
    """Samples are text for a language model: as they lie there, with nothing random."""


class Preparer:
    """Makes batches, in this process."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._reader = SplitReader(work.shards, shape=work.shape)
        text = f"random/1\0{work.seed}\0{work.learner}".encode()
        self._philox = Philox(key=np.frombuffer(blake2b(text, digest_size=16).digest(), dtype=np.uint64))
        self._fresh = self._philox.state
        self._generator = Generator(self._philox)

    def prepare(self, position: int) -> LocalBatch:
        """This rank's slice of the batch that begins at `position`."""
        work, shape = self._work, self._work.shape
        start = position + work.first
        positions = np.arange(start, start + work.count, dtype=np.int64)
        indices = sample_ids(
            work.manifest_digest, n=len(self._reader), seed=work.seed, learner=work.learner, positions=positions
        )
        samples = [self._reader[index] for index in indices.tolist()]
        content = np.frombuffer(b"".join(sample.pixels for sample in samples), dtype=np.uint8)
        image, text = shapes_of(work.count, shape=shape, is_text=work.is_text)
        noise = np.empty(image, dtype=np.float32)
        time = np.zeros(work.count, dtype=np.float32)
        drop = np.zeros(work.count, dtype=np.bool_)
        if work.is_text:
            images = np.zeros(image, dtype=np.float32)
        else:
            pixels = content.reshape(work.count, shape.height, shape.width, shape.channels)
            images, content = to_unit(pixels.transpose(0, 3, 1, 2)), content[:0]
            for row in range(work.count):
                generator = self._generator_at(start + row)
                time[row] = self._draw_time(generator)
                drop[row] = generator.random() < work.condition_dropout
                generator.standard_normal(dtype=np.float32, out=noise[row])
        return LocalBatch(
            position=position,
            images=images,
            text=content.reshape(text),
            labels=np.array([sample.label for sample in samples], dtype=np.int64),
            captions=[sample.caption for sample in samples],
            noise=noise,
            time=time,
            drop=drop,
            ids=[sample.id for sample in samples],
        )

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def _generator_at(self, position: int) -> Generator:
        # The key names the stream, the third counter word the position, which leaves 2^128 draws for each.
        # Setting the counter of one generator takes 5 us; making a new one asks the system for entropy and takes 50.
        self._fresh["state"]["counter"][:] = (0, 0, position, 0)
        self._philox.state = self._fresh
        return self._generator

    def _draw_time(self, generator: Generator) -> np.float32:
        if self._work.time_distribution == "uniform":
            return np.float32(generator.random(dtype=np.float32))
        return np.float32(1 / (1 + np.exp(-generator.standard_normal())))


def run_worker(work: Work, tickets: Connection, results: Connection) -> None:
    """Serve tickets until their pipe closes. Entry point of the process."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the rank decides when we end
    preparer = Preparer(work)
    while ticket := os.read(tickets.fileno(), TICKET.size):  # the pipe's end is the deadline: it closes with the rank
        (position,) = TICKET.unpack(ticket)
        try:
            parts, kind = to_bytes(preparer.prepare(position)), RESULT_BATCH
        except DataError as error:
            told = {"message": error.message, "hint": error.hint, "where": error.where}
            parts, kind = [json.dumps(told).encode()], RESULT_ERROR
        try:
            _send(results.fileno(), [RESULT.pack(position, sum(map(len, parts)), kind), *parts])
        except BrokenPipeError:
            return


def _send(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        sent = os.writev(descriptor, left[:_WRITEV_PARTS])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _die_with_parent() -> None:
    die_with_parent()
    # multiprocessing lends every child the rank's end of the forkserver's life pipe, for children of its own. We keep
    # none, and a worker that held it would keep the forkserver alive after the rank, and so itself.
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]  # noqa: SLF001
    os.close(server._forkserver_alive_fd)  # noqa: SLF001
