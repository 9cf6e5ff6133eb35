"""Saving: the training thread copies what this rank holds; a thread of its own writes, hashes and commits.

Promises: one save at a time; training stands still only for the copy (and for the previous save, if that is not done
yet); a save that fails leaves older checkpoints as they were and is reported, never raised. Must not: use collectives
from its thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spec.errors import DataError, GkrError
from storage import Bucket
from training.checkpoint import store
from training.checkpoint.documents import Manifest, Part, Range, Receipt, coverage_gap
from training.checkpoint.parts import write_part
from training.checkpoint.store import Place, read_receipts, shown
from training.ema import Ema
from training.optimizer import ShardedAdamW
from training.parallel import flat_ranges, local_tensor, replica_count

log = logging.getLogger("checkpoint")

VECTORS = ("model", "exp_avg", "exp_avg_sq", "ema")
EXTRA = "vector."


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is committed."""

    step: int
    path: str
    """Or URI, if it is no folder of this machine."""
    bytes: int
    """Of all parts."""
    blocked_seconds: float
    """How long the training thread stood still."""
    seconds: float
    """From the call to the commit."""


@dataclass(frozen=True)
class CheckpointFailure:
    """A checkpoint that is not; older ones are as they were."""

    step: int
    reason: str


@dataclass
class _Job:
    place: Place
    started: float
    ranks: int
    """Ranks that write parts: the primary replica's, which are the first ones."""
    shapes: dict[str, list[int]]
    ranges: list[Range]
    vectors: dict[str, Tensor]
    optimizer_steps: int
    state: dict[str, Any]
    blocked_seconds: float = field(default=0.0)


class CheckpointWriter:
    """Saves one rank's part; on rank 0 also collects the others' receipts, commits, and deletes old checkpoints."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        keep: int,
        rank: int,
        world_size: int,
        epoch: int,
        attempt: int,
        deadline_seconds: float = 120.0,
    ) -> None:
        assert keep >= 2, "the newest may turn out damaged"
        self._bucket, self._keep, self._rank, self._world_size = bucket, keep, rank, world_size
        self._epoch, self._attempt, self._deadline_seconds = epoch, attempt, deadline_seconds
        self._buffers: dict[str, Tensor] = {}
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._closing = threading.Event()
        self._done: list[SavedCheckpoint | CheckpointFailure] = []
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    def save(
        self,
        *,
        step: int,
        model: nn.Module,
        optimizer: ShardedAdamW,
        ema: Ema,
        state: Mapping[str, Any],
        vectors: Mapping[str, Tensor],
    ) -> None:
        """Start saving; all ranks call it at the same step. `vectors`: more float32 vectors over this rank's flat
        ranges.

        `state` must be JSON; rank 0's is the one that is kept. Returns when everything is copied.
        """
        started = time.monotonic()
        frozen = json.loads(json.dumps(dict(state)))
        if not self._wait_idle(2 * self._deadline_seconds):
            reason = (
                f"the save of an earlier step has not ended within {2 * self._deadline_seconds:g} s; the storage hangs"
            )
            with self._changed:
                self._done.append(CheckpointFailure(step=step, reason=reason))
            return
        ranks = self._world_size // replica_count(model)
        if self._rank >= ranks:
            return
        own = flat_ranges(model)
        sources = {
            "model": [local_tensor(one.parameter).reshape(-1) for one in own],
            "exp_avg": [optimizer.exp_avg],
            "exp_avg_sq": [optimizer.exp_avg_sq],
            "ema": [ema.vector],
            **{EXTRA + name: [vector] for name, vector in vectors.items()},
        }
        job = _Job(
            place=Place(epoch=self._epoch, attempt=self._attempt, step=step),
            started=started,
            ranks=ranks,
            shapes={one.name: list(one.parameter.shape) for one in own},
            ranges=[(one.name, one.start, one.length) for one in own],
            vectors=self._snapshot(sources, elements=sum(one.length for one in own)),
            optimizer_steps=optimizer.steps,
            state=frozen,
        )
        job.blocked_seconds = time.monotonic() - started
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def poll(self) -> list[SavedCheckpoint | CheckpointFailure]:
        """What ended since the last call, without waiting. Rank 0 hears of commits; every rank hears of its own
        failures.
        """
        with self._changed:
            done, self._done = self._done, []
        return done

    def close(self, *, timeout_seconds: float) -> list[SavedCheckpoint | CheckpointFailure]:
        """Let a save that is under way end, within the time given, and stop; what ended since the last poll."""
        self._wait_idle(timeout_seconds)
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        return self.poll()

    def _wait_idle(self, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout=timeout_seconds)

    @torch.no_grad()
    def _snapshot(self, sources: dict[str, list[Tensor]], *, elements: int) -> dict[str, Tensor]:
        """Copies in host memory that is kept for the next save; pinned where they come from a GPU, all copies under way
        at once.
        """
        on_gpu = any(tensor.is_cuda for tensors in sources.values() for tensor in tensors)
        for name, tensors in sources.items():
            if name not in self._buffers:
                self._buffers[name] = torch.empty(elements, dtype=torch.float32, pin_memory=on_gpu)
            assert sum(tensor.numel() for tensor in tensors) == elements, (
                f"{name} does not have this rank's {elements} elements"
            )
            for target, tensor in zip(
                self._buffers[name].split([one.numel() for one in tensors]), tensors, strict=True
            ):
                target.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return {name: self._buffers[name] for name in sources}

    # --- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._job is None and not self._closing.is_set():
                    self._changed.wait(timeout=60.0)
                job = self._job
            if job is None:
                return
            outcome = self._outcome(job)
            with self._changed:
                if outcome is not None:
                    self._done.append(outcome)
                self._job = None
                self._changed.notify_all()

    def _outcome(self, job: _Job) -> SavedCheckpoint | CheckpointFailure | None:
        """Write this rank's part; on rank 0 commit and prune. Nothing escapes: this is the thread's boundary."""
        try:
            size = self._write(job)
            if self._rank:
                return None
        except GkrError as error:
            reason = str(error)
        except Exception as error:  # whatever it is, training goes on and says so
            log.warning("saving step %d", job.place.step, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        else:
            seconds = time.monotonic() - job.started
            self._prune(job.place)
            return SavedCheckpoint(
                step=job.place.step,
                path=shown(self._bucket, job.place.key),
                bytes=size,
                blocked_seconds=job.blocked_seconds,
                seconds=seconds,
            )
        self._give_up(job, reason=reason)
        return CheckpointFailure(step=job.place.step, reason=reason)

    def _write(self, job: _Job) -> int:
        folder, name = job.place.key, f"rank-{self._rank}.safetensors"
        size, digest = write_part(self._bucket, f"{folder}/{name}", vectors=job.vectors)
        part = Part(
            rank=self._rank, file=name, bytes=size, sha256=digest, vectors=list(job.vectors), ranges=job.ranges
        )  # fmt: skip
        self._put_receipt(job, Receipt(rank=self._rank, part=part))
        if self._rank:
            return size
        parts = self._collect(job)
        gap = coverage_gap(job.shapes, parts=parts)
        if gap:
            raise DataError(f"the parts do not make the model: {gap}", where=shown(self._bucket, folder))
        store.commit(
            self._bucket,
            manifest=Manifest(
                step=job.place.step,
                epoch=job.place.epoch,
                attempt=job.place.attempt,
                world_size=self._world_size,
                shapes=job.shapes,
                vectors=list(job.vectors),
                optimizer_steps=job.optimizer_steps,
                state=job.state,
                parts=parts,
            ),
        )
        return sum(part.bytes for part in parts)

    def _put_receipt(self, job: _Job, receipt: Receipt) -> None:
        self._bucket.put(f"{job.place.key}/rank-{self._rank}.json", receipt.write_json().encode())

    def _collect(self, job: _Job) -> list[Part]:
        """All ranks' parts, once their receipts are there; DataError for the first that failed or came too late."""
        where = shown(self._bucket, job.place.key)
        deadline = time.monotonic() + self._deadline_seconds
        parts: dict[int, Part] = {}
        while True:
            for receipt in read_receipts(self._bucket, job.place, ranks=set(range(job.ranks)) - parts.keys()):
                rank = receipt.rank
                if receipt.part is None:
                    raise DataError(f"rank {rank} could not write its part: {receipt.error}", where=where)
                if receipt.part.vectors != list(job.vectors):
                    raise DataError(
                        f"rank {rank} saved {receipt.part.vectors}, rank 0 {list(job.vectors)}", where=where
                    )
                parts[rank] = receipt.part
            if len(parts) == job.ranks:
                return [parts[rank] for rank in range(job.ranks)]
            if time.monotonic() > deadline:
                missing = next(rank for rank in range(job.ranks) if rank not in parts)
                raise DataError(f"no receipt from rank {missing} within {self._deadline_seconds:g} s", where=where)
            self._closing.wait(self._bucket.poll_seconds)

    def _give_up(self, job: _Job, *, reason: str) -> None:
        """Free what the failed attempt holds, and tell rank 0; a full disk may refuse even that, then rank 0's deadline
        speaks.
        """
        try:
            if not self._rank:
                if not store.is_committed(self._bucket, place=job.place):
                    store.remove(self._bucket, place=job.place)
                return
            self._bucket.delete([f"{job.place.key}/rank-{self._rank}.safetensors"])
            self._put_receipt(job, Receipt(rank=self._rank, error=reason))
        except GkrError as error:
            log.warning("cleaning up after step %d: %s", job.place.step, error)

    def _prune(self, own: Place) -> None:
        try:
            gone = store.prune(self._bucket, keep=self._keep, own=own)
        except GkrError as error:
            log.warning("deleting old checkpoints below %s: %s", self._bucket.uri, error)
            return
        if gone:
            log.info("deleted the checkpoints of steps %s", ", ".join(str(place.step) for place in gone))
