"""A loader worker: fills one rank's part of a batch for each ticket it is handed, in a process of its own.

The forkserver preloads this module, so it imports numpy, Pillow and the standard library only: no torch, no pydantic.
What a sample looks like depends on (seed, learner, position), on (seed, source, epoch, sample) for its crop, and on the
dataset, never on which worker prepares it, how often, or beside what. A sample that cannot be used is replaced by the
rule of `training.data.quarantine` and told. The worker ends when its ticket pipe closes and is killed by the kernel
when its forkserver goes, which goes when the rank goes; nothing of it has a name on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from spec.errors import DataError, GkrError, UnreachableError
from spec.shard_bytes import REMEDY
from storage.encoded import Unusable
from training.data.arena import ArenaFile
from training.data.batch import Form, LocalBatch, make_batch, to_unit
from training.data.contents import MIDDLE, Contents, Known, Look, SourceFiles, open_contents
from training.data.plan import Source
from training.data.quarantine import Bad, candidates
from training.data.tickets import BATCH, ERROR, LATER, NO_SLOT, RESULT, ROW, Ticket, read_ticket
from training.processes import die_with_parent, keep_freed_memory

TimeDistribution = Literal["uniform", "logit-normal"]
TRIES = 100
"""Samples that are tried in the place of one that cannot be used."""
KILLED = "killed"
"""Reason of a sample that ended the workers that touched it."""
_WRITEV_PARTS = 512


@dataclass(frozen=True)
class Work:
    """Everything that decides what a ticket's samples look like. Travels to the worker, so plain values only."""

    sources: tuple[SourceFiles, ...]
    sizes: tuple[tuple[int, int], ...]
    """(width, height) of each bucket."""
    channels: int
    seed: int
    learner: str
    condition_dropout: float
    time_distribution: TimeDistribution
    is_text: bool = False
    """Samples are text for a language model: as they lie there, with nothing random."""
    is_plain: bool = False
    """Images stay uint8 and bring no noise."""
    crop: bool = True
    """Crops of encoded images lie anywhere; else in the middle."""
    flip: bool = False
    """Half of the encoded images are mirrored."""
    embedding: int = 0
    """Features of the embeddings that are taken from the datasets; 0: none are."""

    def form(self, bucket: int, count: int) -> Form:
        """Of a batch of so many samples."""
        width, height = self.sizes[bucket]
        return Form(
            count,
            height,
            width,
            self.channels,
            is_text=self.is_text,
            is_plain=self.is_plain,
            embedding=self.embedding,
        )


class Prepared(NamedTuple):
    """A ticket's batch."""

    memory: NDArray[np.uint8]
    arrays: dict[str, NDArray[Any]]
    """Views of `memory`."""
    captions: list[str]
    bad: list[Bad]

    def batch(self, ticket: Ticket) -> LocalBatch:
        """As the rank has it."""
        return make_batch(self.arrays, ticket=ticket, captions=self.captions)


class Streams:
    """Random numbers by place: each place has a stream of its own, with 2^128 numbers."""

    def __init__(self, name: str) -> None:
        self._philox = Philox(key=np.frombuffer(blake2b(name.encode(), digest_size=16).digest(), dtype=np.uint64))
        self._fresh = self._philox.state
        self._generator = Generator(self._philox)

    def at(self, place: int, more: int = 0) -> Generator:
        """The stream of a place, from its beginning; the one before ends."""
        # Setting the counter of one generator takes 5 us; making a new one asks the system for entropy and takes 50.
        self._fresh["state"]["counter"][:] = (0, 0, place, more)
        self._philox.state = self._fresh
        return self._generator


class _Open(NamedTuple):
    where: str
    source: Source
    contents: Contents
    looks: Streams | None
    """For crops; none where nothing is random."""


class Preparer:
    """Makes batches, in this process."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._sources = [_open(files, work=work) for files in work.sources]
        self._positions = Streams(f"random/1\0{work.seed}\0{work.learner}")
        self._scratch = np.empty(0, dtype=np.uint8)

    def prepare(
        self, ticket: Ticket, memory: NDArray[np.uint8] | None = None, *, begin: Callable[[int], None] | None = None
    ) -> Prepared:
        """The samples of a ticket, in `memory` if it is given. `begin` is told each row before it is touched."""
        count, work = len(ticket.refs), self._work
        form = work.form(ticket.bucket, count)
        if memory is None:
            memory = np.empty(form.bytes, dtype=np.uint8)
        arrays = form.arrays(memory)
        for name in ("source", "sample", "epoch"):
            arrays[name][:] = ticket.refs[name]
        pixels = self._pixels(arrays, form)
        for number, one in enumerate(self._sources):
            if work.sources[number].origin is not None:
                one.contents.expect(ticket.refs["sample"][ticket.refs["source"] == number].tolist())
        known, bad = list[Known](), list[Bad]()
        for row, (sample, epoch, source, skip) in enumerate(ticket.refs.tolist()):
            if begin is not None:
                begin(row)
            one, reason = self._sources[source], KILLED
            try:
                if not skip:
                    known.append(one.contents.fill(pixels[row], sample, look=self._look(one, sample, epoch)))
                    continue
            except Unusable as error:
                reason = error.reason
            wanted = Bad(ticket.first + row, source, sample, reason, -1)
            other, found = self._replace(pixels[row], wanted, epoch=epoch)
            known.append(found)
            bad.append(replace(wanted, replacement=other))
        for one in bad:
            arrays["sample"][one.position - ticket.first] = one.replacement
        arrays["labels"][:] = [one.label for one in known]
        arrays["ids"][:] = [one.id for one in known]
        for row, one in enumerate(known if work.embedding else ()):
            arrays["embeddings"][row] = one.embedding
        arrays["time"][:], arrays["drop"][:] = 0, False
        if not work.is_text:
            if not work.is_plain:
                to_unit(pixels.transpose(0, 3, 1, 2), out=arrays["images"])
            self._draw(arrays, first=ticket.first)
        return Prepared(memory, arrays, [one.caption for one in known], bad)

    def close(self) -> None:
        """Close all files."""
        for one in self._sources:
            one.contents.close()

    def _pixels(self, arrays: dict[str, NDArray[Any]], form: Form) -> NDArray[np.uint8]:
        """Where samples are written, [b, height, width, channels]: in place, if they stay as they are."""
        shape = (form.count, form.height, form.width, form.channels)
        if form.is_text or form.is_plain:
            return arrays["text" if form.is_text else "images"].reshape(shape)
        size = int(np.prod(shape))
        if self._scratch.size < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size].reshape(shape)

    def _replace(self, out: NDArray[np.uint8], bad: Bad, *, epoch: int) -> tuple[int, Known]:
        """The first sample by rule that can take the place of a bad one."""
        one, work = self._sources[bad.source], self._work
        others = candidates(one.source, sample=bad.sample, position=bad.position, seed=work.seed, learner=work.learner)
        for other in islice(others, TRIES):
            with contextlib.suppress(Unusable):
                return other, one.contents.fill(out, other, look=self._look(one, other, epoch))
        raise DataError(
            f"sample {bad.sample} cannot be used ({bad.reason}), nor can any of those that could take its place",
            where=one.where,
            hint=REMEDY,
        )

    def _look(self, one: _Open, sample: int, epoch: int) -> Look:
        if one.looks is None:
            return MIDDLE
        across, down, mirrored = one.looks.at(sample, epoch).random(3).tolist()
        if not self._work.crop:
            across = down = 0.5
        return Look(across, down, self._work.flip and mirrored < 0.5)

    def _draw(self, arrays: dict[str, NDArray[Any]], *, first: int) -> None:
        work, noise = self._work, arrays["noise"]
        for row in range(len(noise)):
            generator = self._positions.at(first + row)
            arrays["time"][row] = self._draw_time(generator)
            arrays["drop"][row] = generator.random() < work.condition_dropout
            if noise.size:
                generator.standard_normal(dtype=np.float32, out=noise[row])

    def _draw_time(self, generator: Generator) -> np.float32:
        if self._work.time_distribution == "uniform":
            return np.float32(generator.random(dtype=np.float32))
        return np.float32(1 / (1 + np.exp(-generator.standard_normal())))


def _open(files: SourceFiles, *, work: Work) -> _Open:
    looks = None
    if files.index and (work.crop or work.flip):
        looks = Streams(f"look/1\0{work.seed}\0{files.digest}")
    return _Open(files.where, files.source(), open_contents(files), looks)


def run_worker(
    environment: Mapping[str, str], work: Work, arena: ArenaFile | None, tickets: Connection, results: Connection
) -> None:
    """Serve tickets until their pipe closes. Entry point of the process."""
    _die_with_parent()
    # Ours is that of the forkserver's start: what the rank has learned since of its buckets and credentials is missing.
    os.environ.clear()
    os.environ.update(environment)
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the rank decides when we end
    preparer = _opened(work)
    slots = arena.map() if arena is not None else []
    while (ticket := read_ticket(tickets.fileno())) is not None:
        try:
            _answer(ticket, preparer=preparer, slots=slots, results=results.fileno())
        except BrokenPipeError:
            return


def _opened(work: Work) -> Preparer | GkrError:
    """Ready to prepare, or why not: every ticket is answered with that, which says more than a death."""
    try:
        return Preparer(work)
    except GkrError as error:
        return error


def _answer(ticket: Ticket, *, preparer: Preparer | GkrError, slots: Sequence[NDArray[np.uint8]], results: int) -> None:
    def begin(row: int) -> None:
        _send(results, [RESULT.pack(ticket.position, 0, 0, row, ROW)])

    kind, body = BATCH, np.empty(0, dtype=np.uint8)
    try:
        if isinstance(preparer, GkrError):
            raise preparer
        slot = slots[ticket.slot] if ticket.slot != NO_SLOT else None
        made = preparer.prepare(ticket, slot, begin=begin if ticket.is_careful else None)
        told: Any = {"captions": made.captions, "bad": [vars(one) for one in made.bad]}
        if slot is None:
            body = made.memory
    except GkrError as error:
        told = {"message": error.message, "hint": error.hint, "where": error.where}
        kind = LATER if isinstance(error, UnreachableError) else ERROR
    tail = json.dumps(told).encode()
    _send(results, [RESULT.pack(ticket.position, len(body), len(tail), 0, kind), body.data, tail])


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
