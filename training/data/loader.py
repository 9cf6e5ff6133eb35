"""Batches of one rank, in the order of its learner, prepared ahead by worker processes.

Promises: batch k of a loader that started at position p is bit for bit what any loader of the same (sources, weights,
buckets, seed, learner, batch) gives for that position, whatever its world size (the ranks' slices put together),
workers, prefetch, and deaths on the way. Positions are delivered in order, none skipped: an encoded image that cannot
be used is replaced by rule and told, anything else that is damaged is an error, never a gap. At most `prefetch` batches
exist at a time besides those that the caller keeps. A dead worker is replaced and what it held is prepared again; what
one holds for much longer than is usual is handed to another as well, and the first answer counts. What a store or disk
did not answer for is asked for once more before it is an error. A position that ended two workers is tried by one that
does nothing else and tells what it touches: the sample that ends it too counts as unusable. No Ray, no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, Self

from spec.buckets import Bucket
from spec.errors import DataError, GkrError, UnreachableError
from spec.shards import Split
from spec.train import AnyModelConfig
from storage.cache_counts import read_counts
from storage.datasets import default_cache
from training.data.arena import LEAST_BYTES, Arena
from training.data.batch import LocalBatch, make_batch
from training.data.fill import Filler
from training.data.mixture import Segment
from training.data.plan import Start, rank_slice
from training.data.pool import Result, WorkerProcess
from training.data.quarantine import Bad, Limits, Quarantine
from training.data.stragglers import Stragglers
from training.data.tickets import ERROR, LATER, NO_SLOT, Ticket, as_records
from training.data.work import Delivery, Order, check_shape, plan_work
from training.data.worker import Preparer, TimeDistribution
from training.preflight.collect import memory

__all__ = ["Loader", "LocalBatch", "WorkerEvent", "check_shape"]

SUSPECT_DEATHS = 2
"""Workers that a position may end before it is tried alone."""
MOST_DEATHS = 10
"""Workers that a position may end at all."""
_TICK_SECONDS = 1.0
_UNSENT_SECONDS = 0.01
_END_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerEvent:
    """A worker died and everything it held has been prepared again."""

    index: int
    cause: str
    """`SIGKILL`, `exit 1`, `forkserver died`."""
    detected_seconds: float
    """From the moment the kernel woke us until we had taken its exit status and knew the cause."""
    redone_seconds: float
    """From the same moment until the last batch it had held was there."""


@dataclass
class _Death:
    index: int
    cause: str
    at: float
    detected_seconds: float
    missing: set[int]


class _Done(NamedTuple):
    batch: LocalBatch
    bad: list[Bad]
    first: int
    """Position of the first sample."""


class Loader:
    """Hands one rank its batches. Safe to use from one thread at a time."""

    def __init__(
        self,
        manifest_uri: str | Sequence[str],
        *,
        seed: int,
        learner: str,
        start_position: int,
        batch: int,
        rank: int,
        world_size: int,
        workers: int,
        prefetch: int,
        model: AnyModelConfig,
        split: Split = "train",
        time_distribution: TimeDistribution = "uniform",
        cache: Path | None = None,
        mixture: Sequence[Segment] = (),
        buckets: Sequence[Bucket] = (),
        starts: Sequence[Start] = (),
        is_plain: bool = False,
        crop: bool = True,
        flip: bool = False,
        limits: Limits | None = None,
        node_ranks: int = 1,
    ) -> None:
        """One manifest, or one per source with the weights of `mixture`; `batch` counts where no `buckets` are given.

        `cache`: where the shards of a dataset that is not on this machine are copied to. `starts`: from a checkpoint.
        `is_plain`, `crop`, `flip`: see `training.data.work.Delivery`. `limits`: how many samples may be unusable.
        `node_ranks`: how many of the ranks are on this node.
        """
        manifests = [manifest_uri] if isinstance(manifest_uri, str) else list(manifest_uri)
        self._counts = read_counts(cache or default_cache())
        order = Order(manifests, seed, learner, batch, split, mixture, buckets, starts)
        delivery = Delivery(model, time_distribution, is_plain=is_plain, crop=crop, flip=flip)
        planned = plan_work(order, delivery=delivery, world_size=world_size, cache=cache)
        self._plan, self._work = planned.plan, planned.work
        self.joined = planned.joined
        """Which bucket each bucket's samples go to: those with too few are joined with others."""
        self.encoder = planned.encoder
        """Fingerprint of what computed the embeddings that batches bring; empty: they bring none."""
        self._rank, self._world_size, self._prefetch = rank, world_size, prefetch
        self._where = ", ".join(manifests)
        self._position = start_position  # next to be delivered
        self._issued = start_position  # next that nobody was asked for yet
        self._ahead: deque[tuple[int, int]] = deque()
        """Where the batches begin that were issued and not delivered, and how many samples of the learner they are."""
        self._tickets: dict[int, Ticket] = {}
        """Those of them that are not done, by position."""
        self._given_back: deque[Ticket] = deque()
        self._done: dict[int, _Done | GkrError] = {}
        self._quarantine, self._bad = Quarantine(limits), list[Bad]()
        self._unreached = set[int]()
        """Positions that met something that may pass, and are tried once more."""
        self._deaths_by_position: dict[int, int] = {}
        self._deaths: list[_Death] = []
        self._events: list[WorkerEvent] = []
        self._stragglers = Stragglers()
        self._broken: BaseException | None = None
        self._closed = False
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._filler = Filler(
            self._work.sources, refs=self._plan.refs, position=start_position, share=node_ranks / world_size
        )
        self._local = Preparer(self._work) if workers == 0 else None
        self._arena: Arena | None = None
        self._workers: list[WorkerProcess] = []
        if workers == 0:
            return
        if planned.largest >= LEAST_BYTES:
            # One batch that the trainer works on, one that it has asked for already.
            self._arena = Arena(slot_bytes=planned.largest, slots=prefetch + 2, available=memory().available_bytes)
        self._wake_reader, self._wake_writer = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_workers)
            for index in range(workers):
                self._workers.append(self._new_worker(index))
            undo.pop_all()
        self._hand_out()
        self._pump = threading.Thread(target=self._run_pump, name="loader-pump", daemon=True)
        self._pump.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Where the next batch begins."""
        return self._position

    @property
    def step(self) -> int:
        """Batches of the learner before the next one."""
        with self._changed:
            return self._plan.step(self._position)

    def starts(self, position: int) -> list[Start]:
        """What a checkpoint at a position holds besides it, so that a loader with several buckets goes on at once."""
        with self._changed:
            return self._plan.starts(position)

    @property
    def plan_digest(self) -> str:
        """Equal for loaders that give equal batches."""
        return self._plan.digest

    @property
    def duplicated(self) -> int:
        """Tickets that were handed to a second worker because the first took long."""
        return self._stragglers.duplicated

    @property
    def ready(self) -> int:
        """Batches that `next` would give without waiting."""
        with self._changed:
            for count, (position, _) in enumerate(self._ahead):
                if position not in self._done:
                    return count
            return len(self._ahead)

    @property
    def pids(self) -> list[int]:
        """Processes of the workers: local diagnosis and tests only."""
        with self._changed:
            return self._pids()

    def next(self, timeout_seconds: float) -> LocalBatch:
        """The next batch, or the error that its position met; an error stays at its place and is raised again."""
        assert not self._closed, "the loader is closed"
        if self._local is not None:
            return self._next_here(self._local)
        with self._changed:
            if not self._changed.wait_for(lambda: self._position in self._done or self._broken, timeout_seconds):
                raise self._late(timeout_seconds)
            if self._position not in self._done:
                assert self._broken is not None
                raise self._broken
            result = self._done[self._position]
            if isinstance(result, GkrError):
                raise result
            try:
                self._book(result)
            except GkrError as error:
                self._done[self._position] = error
                raise
            del self._done[self._position]
            self._position += self._ahead.popleft()[1]
            self._filler.advance(self._position)
            self._hand_out()
            return result.batch

    def cache_counts(self) -> dict[str, int]:
        """What this node's copies have come to in all its processes since this loader was made; empty if all datasets
        are on this machine."""
        folder = next((one.origin.cache for one in self._work.sources if one.origin is not None), None)
        return {} if folder is None else asdict(read_counts(Path(folder)).since(self._counts))

    def worker_events(self) -> list[WorkerEvent]:
        """Deaths of workers that were made good since the last call."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def quarantined(self) -> list[Bad]:
        """Samples of delivered batches that were replaced, since the last call."""
        bad, self._bad = self._bad, []
        return bad

    def close(self) -> None:
        """End the workers; returns when they are gone. A copy in a forked child closes nothing of its parent's."""
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        self._filler.close()
        if self._local is not None:
            self._local.close()
            return
        os.write(self._wake_writer, b"x")
        self._pump.join(_END_SECONDS + 10)
        self._end_workers()
        if self._arena is not None:
            self._arena.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _next_here(self, preparer: Preparer) -> LocalBatch:
        ticket, size = self._ticket(self._position)
        made = preparer.prepare(ticket)
        done = _Done(made.batch(ticket), made.bad, ticket.first)
        self._book(done)
        self._position += size
        self._filler.advance(self._position)
        return done.batch

    def _book(self, done: _Done) -> None:
        """Count what a delivered batch brought; DataError if there is too much damage."""
        self._quarantine.add(done.bad, first=done.first, count=len(done.batch.ids), where=self._where)
        self._bad += done.bad

    def _ticket(self, position: int) -> tuple[Ticket, int]:
        """This rank's part of the batch at a position, and the samples of the whole."""
        batch = self._plan.batch(position)
        own = rank_slice(len(batch.refs), rank=self._rank, world_size=self._world_size)
        whole = len(batch.refs)
        refs = as_records(batch.refs[own])
        return Ticket(position, position + own.start, batch.bucket, refs, whole=whole, mark=batch.mark), whole

    def _new_worker(self, index: int) -> WorkerProcess:
        return WorkerProcess(self._work, index=index, arena=self._arena.file if self._arena is not None else None)

    def _run_pump(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException as error:  # noqa: BLE001  # boundary of the thread: `next` raises it where it can be seen
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _turn(self) -> None:
        """Wait for one thing to happen and deal with all that has."""
        sources: list[Any] = [self._wake_reader]
        with self._changed:
            unsent = [worker for worker in self._workers if not worker.send()]
            for worker in self._workers:
                sources += [worker.results, worker.sentinel]
        woken = set(wait(sources, _UNSENT_SECONDS if unsent else _TICK_SECONDS))
        if self._wake_reader in woken:
            return
        at = time.monotonic()
        for worker in list(self._workers):
            dead = worker.sentinel in woken
            if not dead and worker.results not in woken:
                continue
            with self._changed:
                # What a dead worker still sent is whole and counts; then its pipe is at its end.
                for result in worker.receive():
                    self._stragglers.took(result.seconds)
                    if result.kind == LATER and self._try_again(result.ticket):
                        continue
                    self._settle(result.ticket.position, self._decode(result))
                if dead:
                    self._replace(worker, at=at)
                self._changed.notify_all()
        with self._changed:
            self._double_late_ones()
            self._hand_out()

    def _try_again(self, ticket: Ticket) -> bool:
        """Whether what met a store or disk that did not answer is given out once more."""
        position = ticket.position
        if position not in self._tickets or position in self._unreached:
            return False
        self._unreached.add(position)
        self._free(ticket.slot)
        self._given_back.append(ticket)
        return True

    def _decode(self, result: Result) -> _Done | GkrError:
        ticket, told = result.ticket, result.told
        if result.kind in (ERROR, LATER):
            self._free(ticket.slot)
            kind = UnreachableError if result.kind == LATER else DataError
            return kind(told["message"], hint=told["hint"], where=told["where"])
        lent = result.memory
        if ticket.slot != NO_SLOT:
            assert self._arena is not None
            lent = self._arena.lend(ticket.slot)
        arrays = self._work.form(ticket.bucket, len(ticket.refs)).arrays(lent)
        batch = make_batch(arrays, ticket=ticket, captions=told["captions"])
        return _Done(batch, [Bad(**one) for one in told["bad"]], ticket.first)

    def _settle(self, position: int, value: _Done | GkrError) -> None:
        """Keep a result, unless another worker was faster with the same."""
        if self._tickets.pop(position, None) is not None:
            self._done[position] = value
        self._deaths_by_position.pop(position, None)
        self._unreached.discard(position)
        for death in self._deaths:
            death.missing.discard(position)
        self._finish_deaths()

    def _replace(self, worker: WorkerProcess, *, at: float) -> None:
        cause, is_gone = worker.reap(timeout_seconds=_END_SECONDS)
        detected_seconds = time.monotonic() - at
        worker.release()
        # The oldest was being worked on; the others are no suspects.
        suspect = worker.tickets[0].position if worker.tickets else -1
        held = [ticket for ticket in worker.tickets if ticket.position in self._tickets]
        if is_gone:
            for ticket in worker.tickets:
                self._free(ticket.slot)
        alone: Ticket | None = None
        if held and held[0].position == suspect:
            alone = self._suspect(held[0], row=worker.row, cause=cause)
            if alone is not None or suspect not in self._tickets:
                held = held[1:]
        self._given_back.extendleft(reversed(held))
        self._workers.remove(worker)
        self._hand_out()
        new = self._new_worker(worker.index)
        self._workers.append(new)
        if alone is not None:
            new.is_alone = True
            new.hand(replace(alone, slot=self._take_slot()))
        self._hand_out()
        missing = {ticket.position for ticket in [*held, *([alone] if alone else [])]}
        self._deaths.append(_Death(worker.index, cause, at, detected_seconds, missing))
        self._finish_deaths()

    def _suspect(self, ticket: Ticket, *, row: int, cause: str) -> Ticket | None:
        """What becomes of a ticket that a worker died of: to be tried alone, or settled as an error; else as others."""
        position = ticket.position
        deaths = self._deaths_by_position[position] = self._deaths_by_position.get(position, 0) + 1
        if deaths < SUSPECT_DEATHS:
            return None
        if not ticket.is_careful:
            return replace(ticket, is_careful=True)
        culprit = ticket.refs[row] if row >= 0 else None
        if culprit is None and deaths < MOST_DEATHS:  # before the first row or behind the last: no sample's fault
            return ticket
        if culprit is None or culprit["skip"] or deaths >= MOST_DEATHS or not self._is_encoded(int(culprit["source"])):
            self._settle(position, _poisonous(position, deaths=deaths, cause=cause))
            return None
        refs = ticket.refs.copy()
        refs["skip"][row] = 1
        return replace(ticket, refs=refs)

    def _is_encoded(self, source: int) -> bool:
        return bool(self._work.sources[source].index)

    def _finish_deaths(self) -> None:
        now = time.monotonic()
        for death in [one for one in self._deaths if not one.missing]:
            self._deaths.remove(death)
            self._events.append(WorkerEvent(death.index, death.cause, death.detected_seconds, now - death.at))

    def _hand_out(self) -> None:
        """Give workers as many tickets as the window allows, the least loaded first."""
        while self._given_back or len(self._ahead) < self._prefetch:
            worker = self._least_loaded()
            if worker is None:
                return
            if self._given_back:
                ticket = self._given_back.popleft()
                if ticket.position not in self._tickets:  # another has answered it meanwhile
                    continue
            else:
                ticket, size = self._ticket(self._issued)
                self._ahead.append((self._issued, size))
                self._tickets[self._issued] = ticket
                self._issued += size
            worker.hand(replace(ticket, slot=self._take_slot()))

    def _double_late_ones(self) -> None:
        """Hand what a worker holds for too long to others as well."""
        for worker in self._stragglers.late(self._workers):
            if self._least_loaded(but=worker, strictly=True) is None:
                return
            worker.is_late = True
            for ticket in worker.tickets:
                other = self._least_loaded(but=worker, strictly=True)
                if other is not None and ticket.position in self._tickets:
                    self._stragglers.duplicated += 1
                    other.hand(replace(ticket, slot=self._take_slot()))

    def _least_loaded(self, *, but: WorkerProcess | None = None, strictly: bool = False) -> WorkerProcess | None:
        """Who takes the next ticket; one that is late only if all are and not `strictly`."""
        able = [worker for worker in self._workers if worker is not but and not worker.is_alone]
        quick = [worker for worker in able if not worker.is_late]
        return min(quick or ([] if strictly else able), key=lambda worker: len(worker.tickets), default=None)

    def _take_slot(self) -> int:
        return NO_SLOT if self._arena is None else self._arena.take()

    def _free(self, slot: int) -> None:
        if self._arena is not None:
            self._arena.give_back(slot)

    def _pids(self) -> list[int]:
        return [worker.pid for worker in sorted(self._workers, key=lambda worker: worker.index)]

    def _late(self, timeout_seconds: float) -> UnreachableError:
        """No fault of the data: another attempt may find the store answering, or the disk less busy."""
        held = {worker.pid: [ticket.position for ticket in worker.tickets] for worker in self._workers}
        return UnreachableError(
            f"no batch for position {self._position} within {timeout_seconds:g} s; positions held by pid: {held}",
            where=self._work.learner,
            hint="see what those processes wait for (slow disk, stopped process); if busy, raise train.loader_workers",
        )

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.release()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            worker.reap(timeout_seconds=max(0.0, deadline - time.monotonic()))
        self._workers.clear()


def _poisonous(position: int, *, deaths: int, cause: str) -> DataError:
    return DataError(
        f"{deaths} loader workers in a row died ({cause}) while they prepared position {position}",
        hint="look for the out-of-memory killer in the kernel's log; train.loader_workers: 0 shows it in the rank",
    )
