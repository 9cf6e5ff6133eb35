"""A rank's side of the outer rounds: when to contribute, when to wait, what becomes of an answer.

Rank 0 speaks for the learner (register, beat, commit); every rank sends and fetches its own ranges; every decision is
made by the pure rules of `training.sync.adopt` on a state that all ranks hold alike. Snapshots and applications happen
at step boundaries, on all ranks at the same step: in barrier mode because all wait there, in decoupled mode because the
ranks add up in the step's own collective who has an answer ready. What takes long is done by `training.exchange`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn

from spec import events as ev
from spec.errors import RefusedError, UnreachableError
from spec.plan import Plan
from training import parallel
from training.checkpoint import Loaded
from training.collectives import all_gather_json, gather_floats
from training.context import RuntimeContext
from training.ema import Ema
from training.event_log import EventLog
from training.exchange import Exchange, Place
from training.meter import Meter
from training.progress import ProgressWriter
from training.sync import adopt
from training.sync.adopt import FragmentState, LearnerSyncState
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout, combine_fingerprints, scatter
from training.sync.messages import Registration, Status

PENDING_ROUNDS = 2
"""Rounds of progress that a late learner may carry before it is given up."""
_LOOK_SECONDS = 0.2
"""Between two looks whether the run is final."""
_TELL_SHARE = 0.25
"""Of a round: near the end of a run the syncer hears so soon of what was trained."""
_ENDS = 2
"""Signals of which any one ends a learner's training, at least for a while: the last ones."""
Outlook = Literal["train", "wait", "merge", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where this attempt begins."""

    mode: str
    position: int
    merged: list[int]
    """The learner's samples that are in each fragment."""
    merged_until: list[int]
    """Position that its last merged contribution to each fragment had reached."""


class Rounds:
    """All outer rounds of one rank in one attempt."""

    def __init__(
        self,
        plan: Plan,
        *,
        context: RuntimeContext,
        model: nn.Module,
        ema: Ema,
        page: ProgressWriter,
        meter: Meter,
        events: EventLog,
    ) -> None:
        assert plan.syncer is not None
        assert plan.train is not None
        self._plan, self._context, self._model, self._ema = plan, context, model, ema
        self._page, self._meter, self._events = page, meter, events
        self._syncer = plan.syncer
        self._config = config = plan.syncer.config
        self._decoupled = config.mode == "decoupled"
        own = parallel.flat_ranges(model)
        narrow = [one.name for one in own if one.parameter.dtype != torch.float32]
        assert not narrow, f"{narrow[0]} is not float32: it would swallow small corrections"
        unsent = sorted(model.state_dict().keys() - {one.name for one in own})
        assert not unsent, f"{unsent[0]} is state of the model but no parameter: it would differ between learners"
        self._layout = Layout.from_shapes(
            {one.name: tuple(one.parameter.shape) for one in own}, fragments=config.fragments
        )
        self._client = SyncClient(
            context.syncer_control,
            bulk=context.syncer_bulk,
            run=plan.run,
            learner=context.learner,
            layout=self._layout,
            codec=config.codec,
            connections=config.bulk_connections,
            bytes_per_second=config.bulk_rate / 8 / context.world_size if config.bulk_rate else None,
            barrier_timeout_seconds=config.barrier_timeout,
            heartbeat_seconds=config.heartbeat,
        )
        self._place = Place(
            learner=context.learner,
            rank=context.rank,
            speaks=parallel.is_primary_replica(model_mesh(model)),
            ranges=[(self._layout.offset(one.name) + one.start, one.length) for one in own if one.length],
            device=next(model.parameters()).device,
        )
        self._pending_limit = PENDING_ROUNDS * self._syncer.round_samples
        self._exchange = Exchange(
            self._client, layout=self._layout, place=self._place, config=config, pending_limit=self._pending_limit
        )
        self._state = LearnerSyncState(fragments=(FragmentState(),) * config.fragments)
        self._registration: Registration | None = None
        self._samples_at_base = [0] * config.fragments
        self._theta_sha256 = [""] * config.fragments
        self._began_at = self._last_step_at = time.monotonic()
        self._step_seconds = 0.0
        self._discarded_before = 0
        self._correction_norm = 0.0
        self._draining = False
        """Decoupled: the target is reached, nothing is to be trained any more."""
        self._ended = False
        """The syncer has published the final weights."""
        self.final = False
        """This learner holds them."""

    # --- what the loop asks

    @property
    def version(self) -> int:
        """Merges, over all fragments, in the shared weights that this learner is based on."""
        return sum(one.base_version for one in self._state.fragments)

    @property
    def anchor(self) -> torch.Tensor:
        """The shared weights this rank's displacement counts from, for the checkpoint."""
        return torch.from_numpy(self._exchange.anchor)

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return self._state.to_dict()

    def samples_of_all(self) -> int:
        """Samples of all learners so far, as this learner can know: those merged, and its own pace for everybody."""
        pending = zip(self._samples_at_base, self._state.fragments, strict=True)
        return max(base + one.pending_samples * len(self._plan.learners) for base, one in pending)

    def due(self, signals: Sequence[float]) -> bool:
        """A contribution is to be made at this boundary. `signals`: as for `settle`."""
        return self._state.due() is not None or any(signals[-_ENDS:])

    def signals(self) -> list[float]:
        """What this rank adds to the step's sum: answers rank 0 has, answers that are staged, the learner has to stand
        still, the run is draining.
        """
        if not self._decoupled:
            return []
        fragments = range(len(self._state.fragments))
        answered = [float(self._exchange.answered(one)) for one in fragments]
        staged = [float(self._exchange.staged(one)) for one in fragments]
        outlook = self._look_ahead() if self._context.rank == 0 else "train"
        return [*answered, *staged, float(outlook in {"merge", "wait"}), float(outlook == "drain")]

    def committed(self, samples: int) -> None:
        """One inner step of so many samples is committed."""
        self._check_fence()
        now = time.monotonic()
        self._state = self._state.ran(samples)
        self._step_seconds, self._last_step_at = now - self._last_step_at, now
        if self._context.rank == 0:
            self._report()

    def _check_fence(self) -> None:
        """On rank 0; an error there ends the others."""
        if self._client.fenced:
            raise RefusedError("a newer process speaks for this learner", hint="nothing to do: this attempt is over")

    def _report(self) -> None:
        """What the syncer hears next; soon, if it could be the news that the run has its samples."""
        self._client.report(
            self._page.step,
            pending_samples=max(one.pending_samples for one in self._state.fragments),
            kept_samples=self._state.kept,
            step_seconds=self._step_seconds,
            blocked_seconds=self._meter.rounded(),
            in_flight_steps=max(one.since_steps for one in self._state.fragments),
            measures={"goodput": self._goodput(), "correction_norm": self._correction_norm},
        )
        if self._decoupled and self._near_end() and self._untold() >= self._syncer.round_samples * _TELL_SHARE:
            self._client.beat_soon()

    def _goodput(self) -> float:
        """Time of steps that are merged, or will be, as a share of this attempt's time."""
        seconds = max(time.monotonic() - self._began_at, 1e-9)
        lost = self._discarded() - self._discarded_before
        kept = 1 - lost / max(self._page.samples_run, 1)
        return max(0.0, kept * (1 - sum(self._meter.blocked.values()) / seconds))

    def _discarded(self) -> int:
        return max(one.discarded_samples for one in self._state.fragments)

    def begin(self) -> None:
        """Before the first step: a run that is over, or that drains, needs none."""
        if self._decoupled:
            self._stand(loss=0.0)
        if self._draining or self._ended:
            self._finish(loss=0.0)

    def settle(self, signals: Sequence[float], *, loss: float) -> bool:
        """Everything that is due at this boundary: apply, contribute, wait, end. True if all of the shared weights were
        taken up anew, which with fragments is once in a round.

        `signals`: the sum over ranks of what they added to the step.
        """
        taken = self._take_up(signals) if self._decoupled else []
        while not self._draining and not self._ended and (fragment := self._state.due()) is not None:
            self._contribute(fragment, loss=loss)
            if not self._decoupled:
                self._wait(fragment, cause="barrier")
                taken.append(fragment)
        if self._decoupled:
            for fragment in self._too_far_ahead():
                self._wait(fragment, cause="max_ahead")
                taken.append(fragment)
            if signals[-_ENDS]:
                taken += self._stand(loss=loss)
        if self._draining or self._ended:
            self._finish(loss=loss)
        return self.final or self._layout.fragments - 1 in taken

    def _too_far_ahead(self) -> list[int]:
        most = self._config.max_ahead * self._config.inner_steps
        return [one for one in self._state.in_flight if self._state.fragments[one].pending_steps >= most]

    @contextmanager
    def shared_weights(self) -> Generator[None]:
        """The model holds the shared weights for a while, then again its own."""
        if not any(one.pending_steps for one in self._state.fragments):
            yield
            return
        own = parallel.gather_local(self._model)
        parallel.assign_local(self._model, self.anchor)
        try:
            yield
        finally:
            parallel.assign_local(self._model, own)

    # --- the start of an attempt

    def restore(self, loaded: Loaded | None) -> Beginning:
        """Register, then take up weights, anchor and counters by the restart rule of the design; all ranks alike."""
        self._page.phase("register")  # may wait for a round to close: not the driver's business, see STALL_SECONDS
        saved = LearnerSyncState.from_dict(loaded.state["rounds"]) if loaded else None
        registration, decision = self._place_in_run(saved)
        self._registration, self._state = registration, decision.state
        self._samples_at_base = [registration.samples_total] * self._layout.fragments
        self._draining = self._decoupled and registration.draining
        fragments = range(self._layout.fragments)
        if decision.mode == "exact" and loaded is not None:
            self._exchange.anchor[:] = loaded.vectors["anchor"].numpy()
            for fragment in decision.catch_up:
                self._catch_up(fragment, version=adopt.places(registration)[fragment].version)
            if not self._decoupled:
                self._state = self._state.in_order()
        else:
            for fragment in fragments:
                self._assign_shared(fragment, self._state.fragments[fragment].base_version)
            if loaded is None:
                self._ema.assign(self.anchor)
        position = self._state.cursor
        self._discarded_before = self._discarded()
        if self._context.rank == 0:
            self._report()
        self._ended = registration.final
        found = adopt.places(registration)
        return Beginning(
            mode=decision.mode,
            position=position,
            merged=[one.merged_samples for one in found],
            merged_until=[one.cursor for one in found],
        )

    def _place_in_run(self, saved: LearnerSyncState | None) -> tuple[Registration, adopt.Restart]:
        """Once no contribution of an earlier process waits any more."""
        deadline = time.monotonic() + self._config.barrier_timeout
        while True:
            registration = self._register()
            decision = adopt.restart(saved, registration=registration, inner_steps=self._config.inner_steps)
            if decision.mode != "wait":
                return registration, decision
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"round {registration.version + 1} does not close", hint="see `gkr describe` for who is waited for"
                )
            self._on_first(lambda version=registration.version: self._client.wait_version(version + 1))

    def _register(self) -> Registration:
        def ask() -> Registration:
            found = self._client.register(contract_hash(self._plan), world_size=self._context.world_size)
            if found.version < 0 and not found.seed_needed:
                self._client.wait_version(0)
                found = self._client.register(contract_hash(self._plan), world_size=self._context.world_size)
            return found

        registration = self._on_first(ask, kind=Registration)
        if registration.seed_needed and registration.version < 0:
            whole = self._gather(parallel.gather_local(self._model).cpu().numpy())
            if self._context.rank == 0:
                assert whole is not None
                self._client.put_seed(whole, generation=registration.generation, ema=whole)
                self._client.wait_version(0)
            registration = self._on_first(ask, kind=Registration)
        return registration

    def _catch_up(self, fragment: int, *, version: int) -> None:
        version, shared = self._fetch(fragment, version)
        state, action = adopt.catch_up(
            self._state.fragments[fragment], version=version, pending_limit=self._pending_limit
        )
        cut = self._exchange.cut(fragment)
        base = adopt.moves_from(action, anchor=self._exchange.anchor[cut], snapshot=None)
        self._write(fragment, torch.from_numpy(shared if base is None else shared - base), add=base is not None)
        self._exchange.hold(fragment, shared)
        self._state = self._state.change(fragment, state)

    # --- a contribution and its answer

    def _contribute(self, fragment: int, *, loss: float, last: bool = False) -> None:
        """All ranks call it at the same step."""
        assert self._registration is not None
        sent = self._state.fragments[fragment].snapshot(inner_steps=self._config.inner_steps)
        self._state = self._state.change(fragment, sent)
        self._page.phase("snapshot")
        with self._meter.standing("snapshot"):
            self._exchange.snapshot(fragment, model=self._model, ema=self._ema)
        self._exchange.send(fragment, generation=self._registration.generation, sent=sent, loss=loss, last=last)

    def _take_up(self, signals: Sequence[float]) -> list[int]:
        """Apply what every rank has staged; have prepared what rank 0 got an answer to."""
        count, taken = self._layout.fragments, list[int]()
        for fragment in self._state.in_flight:
            if signals[count + fragment] == self._context.world_size:
                self._apply(fragment)
                taken.append(fragment)
            elif signals[fragment]:
                self._exchange.take(fragment, state=self._state.fragments[fragment])
        self._draining |= signals[-1] > 0
        return taken

    def _wait(self, fragment: int, *, cause: str) -> None:
        """Stand still until the answer is applied."""
        self._page.phase("barrier")
        with self._meter.standing(cause):
            self._exchange.take(fragment, state=self._state.fragments[fragment])
            self._exchange.result(fragment)
        self._apply(fragment)

    def _apply(self, fragment: int) -> None:
        self._page.phase("apply")
        with self._meter.standing("apply"):
            staged = self._exchange.result(fragment)
            verdict, self._correction_norm = staged.verdict, staged.correction_norm
            self._write(fragment, staged.change, add=staged.action != "assign")
            self._exchange.hold(fragment, staged.shared)
            settled = adopt.settle(self._state.fragments[fragment], verdict=verdict, action=staged.action)
            self._state = self._state.change(fragment, settled)
            if not self._decoupled:
                self._state = self._state.in_order()
                if verdict.kind == "late" and staged.action == "carry":
                    self._state = self._state.hurry()
            digest = staged.theta_sha256 if self._decoupled or staged.action != "assign" else self._read_back(fragment)
        self._theta_sha256[fragment] = digest
        self._samples_at_base[fragment] = verdict.samples_total
        self._draining |= self._decoupled and verdict.draining
        self._ended |= verdict.final
        if self._context.rank == 0:
            self._events.emit(
                ev.Applied,
                learner=self._context.learner,
                fragment=fragment,
                round=verdict.version,
                theta_sha256=digest,
                waited_seconds=staged.waited_seconds,
                verdict=verdict.kind,
                staleness=verdict.staleness,
            )
            # What was given up with it is to be trained again: nobody would, while the syncer counts it as kept.
            self._report()

    def _read_back(self, fragment: int) -> str:
        """The digest of the weights that the model really holds, not of the bytes that came over the wire."""
        cut = self._exchange.cut(fragment)
        held = torch.empty(cut.stop - cut.start, device=self._place.device)
        parallel.copy_part(self._model, held, first=cut.start)
        return self._exchange.digest(fragment, held.cpu().numpy())

    def _write(self, fragment: int, values: torch.Tensor, *, add: bool) -> None:
        put = parallel.add_part if add else parallel.assign_part
        put(self._model, values.to(self._place.device), first=self._exchange.cut(fragment).start)

    # --- the end

    def _look_ahead(self) -> Outlook:
        """On rank 0: what the syncer's last word means for this learner."""
        heard = self._client.heard
        if heard is None:
            return "train"
        if heard.draining or heard.final:
            return "drain"
        if heard.remaining == 0:
            return "merge"
        return "wait" if self._near_end() and self._untold() >= self._syncer.round_samples else "train"

    def _near_end(self) -> bool:
        """What is left of the run, if all train at this learner's pace, could be trained while one is out of touch."""
        heard = self._client.heard
        if heard is None or heard.remaining is None:
            return False
        rounds = self._config.max_ahead + self._untold() / self._syncer.round_samples
        return heard.remaining <= len(self._plan.learners) * rounds * self._syncer.round_samples

    def _untold(self) -> int:
        """Samples that the syncer does not know of yet."""
        return self._state.kept - self._client.told

    def _stand(self, *, loss: float) -> list[int]:
        """Train no more than the run needs: merge what is pending until the run drains, or go on if what another
        learner had trained is lost. The fragments whose answers were applied.
        """
        until, pause, taken = time.monotonic() + self._config.barrier_timeout, threading.Event(), list[int]()
        while not self._draining and not self._ended:
            self._check_fence()
            outlook = parallel.broadcast_json(self._look_ahead() if self._context.rank == 0 else None)
            self._draining = outlook == "drain"
            if outlook in {"train", "drain"}:
                break
            if time.monotonic() > until:
                raise UnreachableError(
                    f"the run is near its end, and nothing new was heard for {self._config.barrier_timeout:g} s",
                    hint="see `gkr sync` for who is waited for",
                )
            if outlook == "merge":
                for fragment in self._pending():
                    self._contribute(fragment, loss=loss)
                if in_flight := self._state.in_flight:
                    for fragment in in_flight:
                        self._wait(fragment, cause="barrier")
                    taken += in_flight
                    continue
            self._page.phase("barrier")
            with self._meter.standing("barrier"):
                self._client.beat_soon()
                pause.wait(_LOOK_SECONDS)
        return taken

    def _pending(self) -> list[int]:
        """Fragments that a contribution could be made to now."""
        return [index for index, one in enumerate(self._state.fragments) if one.pending_samples and not one.in_flight]

    def _finish(self, *, loss: float) -> None:
        """The target is reached: take what is in flight, send once more all that is pending, hold the final weights.

        Every answer counts for the ledger, also one that comes after the end.
        """
        until = time.monotonic() + self._config.barrier_timeout
        while True:
            for fragment in self._state.in_flight:
                self._wait(fragment, cause="barrier")
            pending = self._pending()
            if self._ended or not pending or time.monotonic() > until:
                break
            for fragment in pending:
                self._contribute(fragment, loss=loss, last=True)
        self._page.phase("barrier")
        with self._meter.standing("barrier"):
            if not self._ended:
                self._on_first(self._wait_final)
            status: Status = self._on_first(self._client.status, kind=Status)
            for fragment, version in enumerate([one.version for one in status.fragments] or [status.version]):
                self._assign_shared(fragment, version)
                self._theta_sha256[fragment] = self._read_back(fragment)
        self.final = True

    def _wait_final(self) -> None:
        """Rank 0: say that nothing more comes, and wait for the others'."""
        assert self._registration is not None
        self._client.drained(self._registration.generation)
        until, pause = time.monotonic() + self._config.barrier_timeout, threading.Event()
        while not self._client.status().final:
            self._check_fence()
            if time.monotonic() > until:
                raise UnreachableError(
                    f"the run is draining for {self._config.barrier_timeout:g} s and does not become final",
                    hint="see `gkr sync` for who is waited for",
                )
            pause.wait(_LOOK_SECONDS)

    def _assign_shared(self, fragment: int, version: int) -> None:
        """Hold exactly the shared weights of a fragment; counts stay: what is pending then is in no merge."""
        version, shared = self._fetch(fragment, version)
        self._write(fragment, torch.from_numpy(shared), add=False)
        self._exchange.hold(fragment, shared)
        self._state = self._state.change(fragment, replace(self._state.fragments[fragment], base_version=version))

    def report_end(self, *, attempt: int) -> None:
        """Rank 0's account for the ledger."""
        state = self._state.fragments[0]
        self._events.emit(
            ev.LearnerFinished,
            learner=self._context.learner,
            attempt=attempt,
            step=self._page.step,
            samples_pending=state.pending_samples,
            samples_discarded=state.discarded_samples,
            pending=[one.pending_samples for one in self._state.fragments],
            discarded=[one.discarded_samples for one in self._state.fragments],
            theta_sha256=combine_fingerprints(self._theta_sha256),
            round=self.version,
            blocked_seconds=self._meter.rounded(),
            position=self._page.position,
        )

    def leave(self) -> None:
        """Tell the syncer that this learner ends in order."""
        if self._context.rank == 0 and self._registration is not None:
            discarded = [one.discarded_samples for one in self._state.fragments]
            self._client.leave(self._registration.generation, discarded=discarded)

    def close(self) -> None:
        """End threads and connections."""
        self._exchange.close()
        self._client.close()

    # --- inside

    def _fetch(self, fragment: int, version: int) -> tuple[int, Floats]:
        return self._exchange.fetch(fragment, version, renew=lambda: self._client.status().fragments[fragment].version)

    def _gather(self, local: Floats) -> Floats | None:
        """The whole flat vector on rank 0, from the ranks that speak for all copies."""
        ranges = all_gather_json(list(self._place.ranges) if self._place.speaks else [])
        parts = gather_floats(local if self._place.speaks else local[:0])
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


def model_mesh(model: nn.Module) -> Any:
    """The mesh that the model was sharded over."""
    return next(model.parameters()).device_mesh  # type: ignore[attr-defined]
