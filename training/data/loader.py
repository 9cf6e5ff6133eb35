"""Batches of one rank, in the order of its learner, prepared ahead by worker processes.

Promises: batch k of a loader that started at position p is bit for bit what any loader of the same (manifest, seed,
learner, batch) gives for that position, whatever its world size (the ranks' slices put together), workers, prefetch,
and deaths on the way. Positions are delivered in order, none skipped: a damaged shard is an error, never a gap. At
most `prefetch` batches exist at a time. A dead worker is replaced and what it held is prepared again; the same
position killing workers RETRIES times is an error. No Ray, no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from spec.errors import ConfigError, DataError, GkrError
from spec.shards import Manifest, Split, open_manifest, path_of
from spec.train import AnyModelConfig, ModelConfig
from storage.datasets import local_manifest
from training.data.batch import LocalBatch, from_bytes
from training.data.pool import Result, WorkerProcess
from training.data.reader import shard_files
from training.data.worker import RESULT_ERROR, Preparer, TimeDistribution, Work

__all__ = ["Loader", "LocalBatch", "WorkerEvent"]

RETRIES = 3
_TICK_SECONDS = 1.0
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


class Loader:
    """Hands one rank its batches. Safe to use from one thread at a time."""

    def __init__(
        self,
        manifest_uri: str,
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
    ) -> None:
        """`cache`: where the shards of a dataset that is not on this machine are copied to."""
        work = _plan_work(
            manifest_uri, seed=seed, learner=learner, batch=batch, rank=rank, world_size=world_size, model=model,
            split=split, time_distribution=time_distribution, cache=cache,
        )  # fmt: skip
        self._work = work
        self._prefetch = prefetch
        self._position = start_position  # next to be delivered
        self._issued = start_position  # next that nobody was asked for yet
        self._given_back: deque[int] = deque()
        self._done: dict[int, LocalBatch | GkrError] = {}
        self._deaths_by_position: dict[int, int] = {}
        self._deaths: list[_Death] = []
        self._events: list[WorkerEvent] = []
        self._broken: BaseException | None = None
        self._closed = False
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._local = Preparer(work) if workers == 0 else None
        self._workers: list[WorkerProcess] = []
        if workers == 0:
            return
        self._wake_reader, self._wake_writer = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_workers)
            for index in range(workers):
                self._workers.append(WorkerProcess(work, index=index))
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
    def ready(self) -> int:
        """Batches that `next` would give without waiting."""
        with self._changed:
            count = 0
            while self._position + count * self._work.batch in self._done:
                count += 1
            return count

    @property
    def pids(self) -> list[int]:
        """Processes of the workers: local diagnosis and tests only."""
        with self._changed:
            return self._pids()

    def next(self, timeout_seconds: float) -> LocalBatch:
        """The next batch, or the error that its position met; an error stays at its place and is raised again."""
        assert not self._closed, "the loader is closed"
        if self._local is not None:
            batch = self._local.prepare(self._position)
            self._position += self._work.batch
            return batch
        with self._changed:
            if not self._changed.wait_for(lambda: self._position in self._done or self._broken, timeout_seconds):
                raise self._late(timeout_seconds)
            if self._position not in self._done:
                assert self._broken is not None
                raise self._broken
            result = self._done[self._position]
            if isinstance(result, GkrError):
                raise result
            del self._done[self._position]
            self._position += self._work.batch
            self._hand_out()
            return result

    def worker_events(self) -> list[WorkerEvent]:
        """Deaths of workers that were made good since the last call."""
        with self._changed:
            events, self._events = self._events, []
            return events

    def close(self) -> None:
        """End the workers; returns when they are gone. A copy in a forked child closes nothing of its parent's."""
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        if self._local is not None:
            self._local.close()
            return
        os.write(self._wake_writer, b"x")
        self._pump.join(_END_SECONDS + 10)
        self._end_workers()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

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
        for worker in self._workers:
            sources += [worker.results, worker.sentinel]
        woken = set(wait(sources, _TICK_SECONDS))
        if self._wake_reader in woken:
            return
        at = time.monotonic()
        for worker in list(self._workers):
            dead = worker.sentinel in woken
            if not dead and worker.results not in woken:
                continue
            # What a dead worker still sent is whole and counts; then its pipe is at its end.
            results = [(result, self._decode(result)) for result in worker.receive()]
            with self._changed:
                for result, value in results:
                    self._settle(result.position, value)
                if dead:
                    self._replace(worker, at=at)
                self._changed.notify_all()

    def _decode(self, result: Result) -> LocalBatch | GkrError:
        if result.kind == RESULT_ERROR:
            told = json.loads(bytes(result.body))
            return DataError(told["message"], hint=told["hint"], where=told["where"])
        return from_bytes(
            result.body,
            position=result.position,
            count=self._work.count,
            shape=self._work.shape,
            is_text=self._work.is_text,
        )

    def _settle(self, position: int, value: LocalBatch | GkrError) -> None:
        self._done[position] = value
        self._deaths_by_position.pop(position, None)
        for death in self._deaths:
            death.missing.discard(position)
        self._finish_deaths()

    def _replace(self, worker: WorkerProcess, *, at: float) -> None:
        cause = worker.reap(timeout_seconds=_END_SECONDS)
        detected_seconds = time.monotonic() - at
        worker.release()
        held = sorted(worker.tickets)
        if held and self._is_poisonous(held[0]):  # the oldest was being worked on; the others are no suspects
            self._settle(held[0], _poisonous(held[0], cause=cause))
            held = held[1:]
        self._given_back.extendleft(reversed(held))
        self._workers.remove(worker)
        self._hand_out()
        self._workers.append(WorkerProcess(self._work, index=worker.index))
        self._hand_out()
        self._deaths.append(_Death(worker.index, cause, at, detected_seconds, set(held)))
        self._finish_deaths()

    def _is_poisonous(self, position: int) -> bool:
        self._deaths_by_position[position] = self._deaths_by_position.get(position, 0) + 1
        return self._deaths_by_position[position] >= RETRIES

    def _finish_deaths(self) -> None:
        now = time.monotonic()
        for death in [one for one in self._deaths if not one.missing]:
            self._deaths.remove(death)
            self._events.append(WorkerEvent(death.index, death.cause, death.detected_seconds, now - death.at))

    def _hand_out(self) -> None:
        """Give workers as many positions as the window allows, the least loaded first."""
        end = self._position + self._prefetch * self._work.batch
        while self._workers and (self._given_back or self._issued < end):
            if self._given_back:
                position = self._given_back.popleft()
            else:
                position, self._issued = self._issued, self._issued + self._work.batch
            min(self._workers, key=lambda worker: len(worker.tickets)).hand(position)

    def _pids(self) -> list[int]:
        return [worker.pid for worker in sorted(self._workers, key=lambda worker: worker.index)]

    def _late(self, timeout_seconds: float) -> DataError:
        held = {worker.pid: worker.tickets for worker in self._workers}
        return DataError(
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


def _plan_work(
    manifest_uri: str,
    *,
    seed: int,
    learner: str,
    batch: int,
    rank: int,
    world_size: int,
    model: AnyModelConfig,
    split: Split,
    time_distribution: TimeDistribution,
    cache: Path | None,
) -> Work:
    local = local_manifest(manifest_uri, cache=cache, splits=(split,))
    manifest = open_manifest(local)
    _check(manifest, model=model, batch=batch, world_size=world_size, where=manifest_uri)
    count = batch // world_size
    shards = [(shard.path, shard.samples, shard.bytes, shard.sha256) for shard in manifest.shards(split)]
    return Work(
        shards=shard_files(path_of(local).parent, shards),
        shape=manifest.shape,
        manifest_digest=manifest.digest,
        seed=seed,
        learner=learner,
        batch=batch,
        first=rank * count,
        count=count,
        condition_dropout=model.condition_dropout if isinstance(model, ModelConfig) else 0.0,
        time_distribution=time_distribution,
        is_text=model.kind == "lm",
    )


def _check(manifest: Manifest, *, model: AnyModelConfig, batch: int, world_size: int, where: str) -> None:
    check_shape(manifest, model=model, where=where)
    if batch % world_size:
        raise ConfigError(
            f"a batch of {batch} does not divide by {world_size} ranks; the ranks' gradients would weigh unequally",
            hint=f"set train.batch to {batch + world_size - batch % world_size}",
        )


def check_shape(manifest: Manifest, *, model: AnyModelConfig, where: str) -> None:
    """ConfigError unless the dataset's samples are of the model's shape."""
    have, want = (manifest.image_height, manifest.image_width, manifest.image_channels), model.sample_shape
    if have != want:
        change = (
            f"train.model.context: {have[1] - 1}"
            if model.kind == "lm"
            else f"train.model.image_size: {have[0]} and train.model.channels: {have[2]}"
        )
        raise ConfigError(
            f"samples are {' x '.join(map(str, have))} in the dataset, {' x '.join(map(str, want))} in the model",
            where=where,
            hint=f"set {change}, or take another dataset",
        )


def _poisonous(position: int, *, cause: str) -> DataError:
    return DataError(
        f"{RETRIES} loader workers in a row died ({cause}) while they prepared position {position}",
        hint="look for the out-of-memory killer in the kernel's log; train.loader_workers: 0 shows it in the rank",
    )
