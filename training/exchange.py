"""What a contribution costs besides its snapshot, off the training path: one rank's thread for the outer rounds.

The training thread copies (`snapshot`), hands over (`send`, `take`) and looks (`answered`, `staged`). The thread takes
the displacement, has it encoded and sent, exchanges receipts and verdicts with the other ranks' threads over a process
group of its own, fetches the shared weights and prepares the change. Rank 0 waits for verdicts in further threads.

Promises: buffers are allocated once; an error of the thread is raised in the training thread at its next look. All
ranks must hand over the same work in the same order, since the collectives of the threads meet in that order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec.errors import UnreachableError
from spec.sync import SyncConfig
from training import parallel
from training.collectives import Group, all_gather_json, gather_floats
from training.ema import Ema
from training.sync import adopt
from training.sync.adopt import Action, FragmentState
from training.sync.client import SyncClient
from training.sync.layout import Floats, Layout, Ranges, count, fingerprint_weights, intersect, scatter, shift
from training.sync.messages import Contribution, PartReceipt, Verdict
from training.sync.transport import SyncRefusedError

_PATIENCE = 1.5
"""Of a rank for the others' threads, as a share of the syncer's: rank 0 must be the one that says what is missing."""


_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who exchanges what: this rank, and its ranges of the whole vector in the order of `parallel.flat_ranges`."""

    learner: str
    rank: int
    speaks: bool
    """For all copies of the weights: it sends."""
    ranges: Ranges
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An answer that can be applied."""

    verdict: Verdict
    action: Action
    shared: Floats
    """The shared weights of this rank's elements."""
    change: Tensor
    """On the model's device: what to assign, or else to add."""
    theta_sha256: str
    """Of the whole fragment, put together from what the ranks fetched, on rank 0. Empty in barrier mode if the shared
    weights replace the model's: then what the model holds is to be read back from it.
    """
    waited_seconds: float
    """From the snapshot to the answer; on rank 0."""
    correction_norm: float
    """Of the difference between shared weights and snapshot, over all ranks."""


@dataclass(kw_only=True)
class _Room:
    """One fragment's buffers in host memory and its work in progress."""

    ranges: list[tuple[int, int]]
    first: int
    """Of this rank's elements in its own flat order."""
    theta: Tensor
    """Snapshot, kept until the answer is applied: progress since then counts from it."""
    ema: Tensor | None
    delta: Tensor
    ready: torch.Event | None = None
    """The copies from a GPU have arrived."""
    started: float = 0.0
    contribution: Contribution | None = None
    """On rank 0."""
    sending: Future[None] | None = None
    verdict: Future[Verdict] | None = None
    """On rank 0."""
    taking: Future[Staged] | None = None

    @property
    def cut(self) -> slice:
        """In this rank's flat order."""
        return slice(self.first, self.first + self.theta.numel())


class Exchange:
    """One rank's side of all contributions, at most one in flight per fragment."""

    def __init__(
        self, client: SyncClient, *, layout: Layout, place: Place, config: SyncConfig, pending_limit: int
    ) -> None:
        self._client, self._layout, self._place, self._config = client, layout, place, config
        self._pending_limit = pending_limit
        self._patience = _PATIENCE * config.barrier_timeout
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._patience))
        assert isinstance(group, dist.ProcessGroup), "every rank takes part"
        self._group = group
        self._stream = torch.cuda.Stream(place.device) if place.device.type == "cuda" else None
        self._holders = all_gather_json(list(place.ranges) if place.speaks else [])
        self._rooms: list[_Room] = []
        first = 0
        for fragment in range(layout.fragments):
            ranges = intersect(place.ranges, layout.fragment_range(fragment))
            theta, ema, delta = (self._buffer(count(ranges)) for _ in range(3))
            averaged = ema if config.ema == "learners" else None
            self._rooms.append(_Room(ranges=ranges, first=first, theta=theta, ema=averaged, delta=delta))
            first += count(ranges)
        self.anchor: Floats = np.empty(first, np.float32)
        """Shared weights that this rank's displacement counts from."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._waiting = ThreadPoolExecutor(layout.fragments, thread_name_prefix="sync-verdict")

    def cut(self, fragment: int) -> slice:
        """A fragment's elements in this rank's flat order."""
        return self._rooms[fragment].cut

    # --- the training thread

    @torch.no_grad()
    def snapshot(self, fragment: int, *, model: nn.Module, ema: Ema) -> None:
        """Copy weights and average as they are now. From a GPU the copies run beside what comes next."""
        room = self._rooms[fragment]
        room.started = time.monotonic()
        if self._stream is None:
            parallel.copy_part(model, room.theta, first=room.first)
            if room.ema is not None:
                room.ema.copy_(ema.vector[room.cut])
            return
        here = torch.empty_like(room.theta, device=self._place.device, pin_memory=False)
        parallel.copy_part(model, here, first=room.first)
        pairs = [(room.theta, here)] + ([(room.ema, ema.vector[room.cut].clone())] if room.ema is not None else [])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            room.ready = self._stream.record_event(torch.cuda.Event())

    def send(self, fragment: int, *, generation: int, sent: FragmentState, loss: float, last: bool) -> None:
        """Send the snapshot as contribution `sent.seq`."""
        room = self._rooms[fragment]
        room.contribution = room.verdict = room.taking = None
        room.sending = self._thread.submit(self._send, fragment, generation=generation, sent=sent, loss=loss, last=last)

    def answered(self, fragment: int) -> bool:
        """Rank 0 has the verdict."""
        room = self._rooms[fragment]
        if room.sending is not None and room.sending.done():
            room.sending.result(timeout=0)
        return room.verdict is not None and room.verdict.done()

    def take(self, fragment: int, *, state: FragmentState) -> None:
        """Prepare the answer, once: `state` is what all ranks hold now."""
        room = self._rooms[fragment]
        if room.taking is None:
            room.taking = self._thread.submit(self._take, fragment, state)

    def taken(self, fragment: int) -> bool:
        """The answer is being prepared."""
        return self._rooms[fragment].taking is not None

    def staged(self, fragment: int) -> bool:
        """This rank could apply the answer now."""
        taking = self._rooms[fragment].taking
        if taking is None or not taking.done():
            return False
        taking.result(timeout=0)
        return True

    def result(self, fragment: int) -> Staged:
        """The prepared answer; waits for it."""
        room = self._rooms[fragment]
        assert room.sending is not None, "nothing was sent"
        assert room.taking is not None, "the answer was not asked for"
        until = time.monotonic() + 2 * self._patience
        room.sending.result(timeout=until - time.monotonic())
        return room.taking.result(timeout=max(0.0, until - time.monotonic()))

    def hold(self, fragment: int, shared: Floats) -> None:
        """The fragment's anchor is these shared weights from now on."""
        self.anchor[self._rooms[fragment].cut] = shared

    def fetch(
        self, fragment: int, version: int, *, renew: Callable[[], int], group: Group = None
    ) -> tuple[int, Floats]:
        """The shared weights of this rank's elements, of the same version on all ranks: `version`, or a newer one that
        rank 0 gets from `renew` if the syncer does not have it any more.
        """
        ranges, until = self._rooms[fragment].ranges, time.monotonic() + self._config.barrier_timeout
        while True:
            shared: Floats | None = np.empty(0, np.float32)
            try:
                if ranges:
                    shared = self._client.fetch(version, fragment=fragment, ranges=ranges)
            except SyncRefusedError as error:
                if error.reason != "unknown_version":
                    raise
                shared = None
            if all(all_gather_json(shared is not None, group=group)):
                assert shared is not None, "every rank has it"
                return version, shared
            if time.monotonic() > until:
                raise UnreachableError(
                    f"versions of fragment {fragment} are gone before they are fetched",
                    hint="raise sync.keep_states, or give the learner a faster link",
                )
            version = parallel.broadcast_json(renew() if self._place.rank == 0 else None, group=group)

    def digest(self, fragment: int, values: Floats, *, group: Group = None) -> str:
        """Of the whole fragment, gathered from the ranks that speak for all copies; on rank 0, else empty."""
        parts = gather_floats(values if self._place.speaks else values[:0], group=group)
        if parts is None:
            return ""
        start, length = interval = self._layout.fragment_range(fragment)
        whole = np.empty(length, np.float32)
        for held, part in zip(self._holders, parts, strict=True):
            scatter(whole, shift(intersect(held, interval), -start), part)
        return fingerprint_weights(whole)

    def close(self) -> None:
        """Take nothing more; what waits gives up with the client."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)

    # --- the thread

    def _send(self, fragment: int, *, generation: int, sent: FragmentState, loss: float, last: bool) -> None:
        room = self._rooms[fragment]
        if room.ready is not None:
            room.ready.synchronize()
        anchor, receipt = self.anchor[room.cut], None
        delta = np.subtract(room.theta.numpy(), anchor, out=room.delta.numpy())
        if self._place.speaks and room.ranges:
            ema = None
            if room.ema is not None:
                ema = np.subtract(room.ema.numpy(), anchor, out=room.ema.numpy())
            receipt = self._client.put_part(
                delta,
                ema=ema,
                ranges=room.ranges,
                fragment=fragment,
                generation=generation,
                seq=sent.seq,
                rank=self._place.rank,
            )
        receipts = all_gather_json(msgspec.to_builtins(receipt), group=self._group)
        if self._place.rank != 0:
            return
        room.contribution = Contribution(
            learner=self._place.learner,
            generation=generation,
            fragment=fragment,
            seq=sent.seq,
            base_version=sent.base_version,
            steps=sent.pending_steps,
            samples=sent.pending_samples,
            cursor=sent.cursor,
            parts=[msgspec.convert(one, PartReceipt) for one in receipts if one is not None],
            fingerprint=self._layout.fingerprint,
            discarded_samples=sent.discarded_samples,
            inner_loss=loss,
            codec=self._config.codec,
            last=last,
        )
        room.verdict = self._waiting.submit(self._client.commit, room.contribution)

    def _take(self, fragment: int, state: FragmentState) -> Staged:
        room = self._rooms[fragment]
        found = None
        if self._place.rank == 0:
            assert room.verdict is not None, "sending comes first"
            found = room.verdict.result(timeout=self._patience)
        waited = time.monotonic() - room.started
        verdict = msgspec.convert(parallel.broadcast_json(msgspec.to_builtins(found), group=self._group), Verdict)
        action = adopt.choose(state, verdict=verdict, pending_limit=self._pending_limit, mode=self._config.adopt)
        version, shared = self.fetch(fragment, verdict.version, renew=lambda: self._newest(fragment), group=self._group)
        base = adopt.moves_from(action, anchor=self.anchor[room.cut], snapshot=room.theta.numpy())
        correction = self._norm(shared, room.theta.numpy())
        apart = base is not None or self._config.mode == "decoupled"
        change = shared if base is None else np.subtract(shared, base, out=room.delta.numpy())
        return Staged(
            verdict=msgspec.structs.replace(verdict, version=version),
            action=action,
            shared=shared,
            change=self._to_device(change),
            theta_sha256=self.digest(fragment, shared, group=self._group) if apart else "",
            waited_seconds=waited,
            correction_norm=correction,
        )

    def _norm(self, shared: Floats, snapshot: Floats) -> float:
        """In pieces that stay in a core's cache."""
        own = 0.0
        for start in range(0, len(shared) if self._place.speaks else 0, _PIECE):
            apart = shared[start : start + _PIECE] - snapshot[start : start + _PIECE]
            own += float(np.dot(apart, apart))
        return math.sqrt(sum(all_gather_json(own, group=self._group)))

    def _newest(self, fragment: int) -> int:
        """The recorded verdict again: it names the newest version."""
        contribution = self._rooms[fragment].contribution
        assert contribution is not None, "rank 0 has made it"
        return self._client.commit(contribution).version

    def _to_device(self, values: Floats) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._stream is None:
            return tensor
        with torch.cuda.stream(self._stream):
            moved = tensor.pin_memory().to(self._place.device, non_blocking=True)
        self._stream.synchronize()
        return moved

    def _buffer(self, elements: int) -> Tensor:
        return torch.empty(elements, dtype=torch.float32, pin_memory=self._stream is not None)
