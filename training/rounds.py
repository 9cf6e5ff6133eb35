"""A rank's side of the outer rounds: the place where `torch.distributed` inside a learner meets HTTP to the syncer.

Rank 0 speaks for the learner (register, beat, commit); every rank sends and fetches its own ranges; every decision is
made by the pure rules of `training.sync.adopt` on a state that all ranks hold alike. Snapshots and applications happen
at step boundaries, on all ranks at the same step. Only rank 0 keeps a heartbeat.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from spec import events as ev
from spec.errors import RefusedError, UnreachableError
from spec.plan import Plan
from training import parallel
from training.checkpoint import Loaded
from training.collectives import all_gather_json, gather_floats
from training.context import RuntimeContext
from training.ema import Ema
from training.event_log import EventLog
from training.meter import Meter
from training.models.dit import DiT
from training.progress import ProgressWriter
from training.sync import adopt
from training.sync.adopt import LearnerSyncState
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout, fingerprint_weights, scatter
from training.sync.messages import Contribution, PartReceipt, Registration, Verdict

PENDING_ROUNDS = 2
"""Rounds of progress that a late learner may carry before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where this attempt begins."""

    mode: str
    step: int
    position: int


class Rounds:
    """All outer rounds of one rank in one attempt."""

    def __init__(
        self,
        plan: Plan,
        *,
        context: RuntimeContext,
        model: DiT,
        ema: Ema,
        page: ProgressWriter,
        meter: Meter,
        events: EventLog,
    ) -> None:
        assert plan.syncer is not None
        assert plan.train is not None
        self._plan, self._context, self._model, self._ema = plan, context, model, ema
        self._page, self._meter, self._events = page, meter, events
        self._syncer, self._batch = plan.syncer, plan.train.batch
        own = parallel.flat_ranges(model)
        self._layout = Layout.from_shapes({one.name: tuple(one.parameter.shape) for one in own})
        self._speaks = parallel.is_primary_replica(model_mesh(model))
        self._ranges = [(self._layout.offset(one.name) + one.start, one.length) for one in own if one.length]
        config = plan.syncer.config
        self._client = SyncClient(
            context.syncer_control,
            bulk=context.syncer_bulk,
            run=plan.run,
            learner=context.learner,
            layout=self._layout,
            barrier_timeout_seconds=config.barrier_timeout,
            heartbeat_seconds=config.heartbeat,
        )
        self._state = LearnerSyncState()
        self._registration: Registration | None = None
        self._samples_at_base = 0
        self._anchor: Floats = self._local()
        self._theta_sha256 = ""
        self._last_step_at = time.monotonic()
        self.final = False

    # --- what the loop asks

    @property
    def version(self) -> int:
        """Of the shared weights that this learner is based on."""
        return self._state.base_version

    @property
    def anchor(self) -> torch.Tensor:
        """The shared weights this rank's displacement counts from, for the checkpoint."""
        return torch.from_numpy(self._anchor)

    def to_state(self) -> dict[str, int]:
        """What a checkpoint must hold."""
        return self._state.to_dict()

    def committed(self) -> None:
        """One inner step is committed."""
        if self._client.fenced:
            raise RefusedError("a newer process speaks for this learner", hint="nothing to do: this attempt is over")
        now = time.monotonic()
        self._state = self._state.ran(self._batch)
        if self._context.rank == 0:
            self._client.report(
                self._page.step, pending_samples=self._state.pending_samples, step_seconds=now - self._last_step_at
            )
        self._last_step_at = now

    def due(self) -> bool:
        """True when a round's worth of samples is pending."""
        return self._state.pending_samples >= self._syncer.round_samples

    def samples_of_all(self) -> int:
        """Samples of all learners so far, as this learner can know: those merged, and its own pace for everybody."""
        return self._samples_at_base + self._state.pending_samples * len(self._plan.learners)

    # --- the start of an attempt

    def restore(self, loaded: Loaded | None) -> Start:
        """Register, then take up weights, anchor and counters by the restart rule of the design; all ranks alike."""
        self._page.phase("register")  # may wait for a round to close: not the driver's business, see STALL_SECONDS
        saved = LearnerSyncState.from_dict(loaded.state["rounds"]) if loaded else None
        registration = self._register()
        decision = adopt.restart(saved, registration=registration)
        deadline = time.monotonic() + self._syncer.config.barrier_timeout
        while decision.mode == "wait":
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"round {registration.version + 1} does not close", hint="see `gkr describe` for who is waited for"
                )
            self._on_first(lambda version=registration.version: self._client.wait_version(version + 1))
            registration = self._register()
            decision = adopt.restart(saved, registration=registration)
        self._registration, self._state, self.final = registration, decision.state, registration.final
        self._samples_at_base = registration.samples_total
        if decision.mode == "exact" and loaded is not None:
            self._anchor = loaded.vectors["anchor"].numpy()
            if decision.catch_up:
                self._catch_up(registration)
        else:
            self._take_shared(registration, with_ema=loaded is None)
        position = self._state.cursor
        return Start(mode=decision.mode, step=position // self._batch, position=position)

    def _register(self) -> Registration:
        def ask() -> Registration:
            found = self._client.register(contract_hash(self._plan), world_size=self._context.world_size)
            if found.version < 0 and not found.seed_needed:
                self._client.wait_version(0)
                found = self._client.register(contract_hash(self._plan), world_size=self._context.world_size)
            return found

        registration = self._on_first(ask, kind=Registration)
        if registration.seed_needed and registration.version < 0:
            whole = self._gather(self._local())
            if self._context.rank == 0:
                assert whole is not None
                self._client.put_seed(whole, generation=registration.generation, ema=whole)
                self._client.wait_version(0)
            registration = self._on_first(ask, kind=Registration)
        return registration

    def _take_shared(self, registration: Registration, *, with_ema: bool) -> None:
        shared = self._client.fetch(registration.version, ranges=self._ranges)
        self._assign(shared)
        if with_ema:
            self._ema.assign(torch.from_numpy(shared.copy()))
        self._anchor = shared

    def _catch_up(self, registration: Registration) -> None:
        limit = PENDING_ROUNDS * self._syncer.round_samples
        self._state, action = adopt.catch_up(
            self._state, version=registration.version, pending_limit=limit, final=registration.final
        )
        shared = self._client.fetch(registration.version, ranges=self._ranges)
        theta, self._anchor = adopt.apply_action(self._local(), action=action, anchor=self._anchor, shared=shared)
        self._assign(theta)

    # --- a round

    def exchange(self, *, loss: float) -> None:
        """Contribute, wait for the verdict, apply it. All ranks call it at the same step."""
        assert self._registration is not None
        self._state = self._state.snapshot()
        generation, seq = self._registration.generation, self._state.seq
        self._page.phase("snapshot")
        with self._meter.standing("snapshot"):
            theta = self._local()
            ema = self._ema.vector.detach().float().cpu().numpy().copy()
            receipt: PartReceipt | None = None
            if self._speaks:
                receipt = self._client.put_part(
                    theta - self._anchor,
                    ema=ema,
                    ranges=self._ranges,
                    generation=generation,
                    seq=seq,
                    rank=self._context.rank,
                )
            receipts = self._collect(receipt)
        waiting = time.monotonic()
        self._page.phase("barrier")
        with self._meter.standing("barrier"):
            verdict = self._on_first(
                lambda: self._commit(receipts, generation=generation, seq=seq, loss=loss), kind=Verdict
            )
        waited = time.monotonic() - waiting
        self._page.phase("apply")
        with self._meter.standing("apply"):
            self._apply(verdict, theta=theta)
        self._samples_at_base, self.final = verdict.samples_total, verdict.final
        if self._context.rank == 0:
            self._events.emit(
                ev.Applied,
                learner=self._context.learner,
                round=verdict.version,
                theta_sha256=self._theta_sha256,
                waited_seconds=waited,
                verdict=verdict.kind,
            )

    def _commit(self, receipts: list[PartReceipt], *, generation: int, seq: int, loss: float) -> Verdict:
        state = self._state
        return self._client.commit(
            Contribution(
                learner=self._context.learner,
                generation=generation,
                seq=seq,
                base_version=state.base_version,
                steps=state.pending_steps,
                samples=state.pending_samples,
                cursor=state.cursor,
                parts=receipts,
                fingerprint=self._layout.fingerprint,
                discarded_samples=state.discarded_samples,
                inner_loss=loss,
            )
        )

    def _apply(self, verdict: Verdict, *, theta: Floats) -> None:
        limit = PENDING_ROUNDS * self._syncer.round_samples
        self._state, action = adopt.decide(self._state, verdict=verdict, pending_limit=limit)
        shared = self._client.fetch(verdict.version, ranges=self._ranges)
        new, self._anchor = adopt.apply_action(theta, action=action, anchor=self._anchor, shared=shared)
        self._assign(new)
        # What is reported is the digest of the weights that the model really holds, read back from it (or of the
        # anchor, when progress was carried onto it), not of the bytes that came over the wire.
        whole = self._gather(self._local() if action == "assign" else self._anchor)
        if whole is not None:
            self._theta_sha256 = fingerprint_weights(whole)

    # --- the end

    def report_end(self, *, attempt: int) -> None:
        """Rank 0's account for the ledger."""
        self._events.emit(
            ev.LearnerFinished,
            learner=self._context.learner,
            attempt=attempt,
            step=self._page.step,
            samples_pending=self._state.pending_samples,
            samples_discarded=self._state.discarded_samples,
            theta_sha256=self._theta_sha256,
            round=self.version,
            blocked_seconds=self._meter.rounded(),
        )

    def leave(self) -> None:
        """Tell the syncer that this learner ends in order."""
        if self._context.rank == 0 and self._registration is not None:
            self._client.leave(self._registration.generation, discarded_samples=self._state.discarded_samples)

    def close(self) -> None:
        """End threads and connections."""
        self._client.close()

    # --- inside

    def _local(self) -> Floats:
        return parallel.gather_local(self._model).cpu().numpy()

    def _assign(self, flat: Floats) -> None:
        parallel.assign_local(self._model, torch.from_numpy(np.ascontiguousarray(flat)))

    def _collect(self, receipt: PartReceipt | None) -> list[PartReceipt]:
        """All parts' receipts, on every rank."""
        return [
            msgspec.convert(one, PartReceipt)
            for one in all_gather_json(msgspec.to_builtins(receipt))
            if one is not None
        ]

    def _gather(self, local: Floats) -> Floats | None:
        """The whole flat vector on rank 0, from the ranks that speak for all copies."""
        ranges = all_gather_json(self._ranges if self._speaks else [])
        parts = gather_floats(local if self._speaks else local[:0])
        if parts is None:
            return None
        whole = np.empty(self._layout.total, dtype=np.float32)
        for own, part in zip(ranges, parts, strict=True):
            scatter(whole, own, part)
        return whole

    def _on_first(self, ask: Any, *, kind: Any = None) -> Any:
        """What rank 0 got, on every rank. An error there ends the others through their broken collective."""
        answer = ask() if self._context.rank == 0 else None
        shared = parallel.broadcast_json(msgspec.to_builtins(answer) if kind is not None else None)
        return msgspec.convert(shared, kind) if kind is not None else None


def model_mesh(model: DiT) -> Any:
    """The mesh that the model was sharded over."""
    return next(model.parameters()).device_mesh  # type: ignore[attr-defined]
