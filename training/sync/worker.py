"""What the syncer does by itself: merge a sealed round, commit it, publish it, and let leases and deadlines run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from spec.events import SyncMember, SyncMerged, write_event
from training.sync.core import Core
from training.sync.events import Committed, MergeDone, Published, Tick
from training.sync.layout import Floats, fingerprint_weights
from training.sync.machine import step
from training.sync.members import Round
from training.sync.merge import Displacement, MergeResult, MergeRules, average_models, merge
from training.sync.outer import OuterState
from training.sync.refusals import Refusal
from training.sync.state import write_state
from training.sync.store import DeposedError

_LOG = logging.getLogger(__name__)
_LONGEST_RETRY = 30.0


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """A merged round that is not committed yet."""

    round: Round
    result: MergeResult
    average: Floats
    sealed: float
    seconds: float
    size: int


class Worker:
    """The one thread that moves a sealed round on."""

    def __init__(self, core: Core, *, retry_seconds: float) -> None:
        self._core = core
        self._retry_seconds = retry_seconds
        config = core.settings.config
        self._rules = MergeRules(
            learning_rate=config.outer_learning_rate,
            momentum=config.outer_momentum,
            round_samples=core.settings.round_samples,
            weighting=config.weighting,
        )

    def tick(self) -> None:
        """Let leases and deadlines run."""
        with self._core.changed:
            self._core.apply(Tick(now=self._core.clock()))

    def check_store(self) -> None:
        """End if another syncer has taken over."""
        try:
            self._core.store.check()
        except DeposedError as error:
            self._core.fail(error)
        except OSError as error:
            _LOG.warning("the store cannot be read: %s", error)

    def work_once(self, *, wait_seconds: float = 0.0) -> bool:
        """Take the round from SEALED to published, if it is sealed within the wait; whether it was."""
        core = self._core
        with core.changed:
            core.changed.wait_for(lambda: self._sealed() is not None or core.stopping.is_set(), timeout=wait_seconds)
            sealed, outer = self._sealed(), core.outer
            if sealed is None or outer is None or core.stopping.is_set():
                return False
        core.store.point("sealed")
        merged = self._merge(sealed, outer)
        with core.changed:
            core.apply(MergeDone())
        core.store.point("merged")
        retry = self._retry_seconds
        while not core.stopping.is_set():
            try:
                self._commit(merged)
            except OSError as error:
                core.raise_alarm(
                    f"version {sealed.number} is not committed and not published: {error}; next try in {retry:g} s"
                )
                core.stopping.wait(retry)
                retry = min(2 * retry, _LONGEST_RETRY)
            except Refusal:
                return False
            else:
                core.alarm = ""
                return True
        return False

    def _sealed(self) -> Round | None:
        current = self._core.state.round
        return current if current is not None and current.stage == "SEALED" else None

    def _merge(self, sealed: Round, outer: OuterState) -> _Merged:
        core, started = self._core, self._core.clock()
        names = sorted(sealed.arrivals)
        taken = {name: core.staging.take(name) for name in names}
        shares = [
            Displacement(learner=name, delta=taken[name][0].delta, samples=sealed.arrivals[name].samples)
            for name in names
        ]
        averages = [(name, taken[name][0].ema, sealed.arrivals[name].samples) for name in names]
        return _Merged(
            round=sealed,
            result=merge(outer, shares, rules=self._rules),
            average=average_models(averages, round_samples=core.settings.round_samples),
            sealed=started,
            seconds=core.clock() - started,
            size=sum(size for _, size in taken.values()),
        )

    def _commit(self, merged: _Merged) -> None:
        """DURABLE comes before published: state file, then HEAD, then the new weights are served and verdicts given."""
        core, started = self._core, self._core.clock()
        outer = merged.result.outer
        model = core.publish_model(merged.average, version=merged.round.number)
        event = Committed(now=started, theta_sha256=fingerprint_weights(outer.theta), model_sha256=model)
        with core.changed:
            ledger = step(core.state, event)[0].durable()
        line = self._describe(merged, event, durable_seconds=core.clock() - started)
        note = core.note(ledger, outer, event=write_event(line))
        written = write_state(outer, note=note, folder=core.store.states, point=core.store.point)
        core.store.keep(written)
        with core.changed:
            core.apply(event, save=lambda newest: core.store.commit(newest, state=written))
            core.store.point("durable")
            core.outer = outer
            core.journal.emit(self._describe(merged, event, durable_seconds=core.clock() - started))
            core.emit_ledger()
            for arrival in merged.round.arrivals.values():
                core.staging.drop(arrival.learner, generation=arrival.generation, seq=arrival.seq)
            core.apply(Published(now=core.clock()))
        core.store.point("published")
        try:
            core.store.prune()
        except OSError as error:
            _LOG.warning("old states cannot be removed: %s", error)

    def _describe(self, merged: _Merged, event: Committed, *, durable_seconds: float) -> SyncMerged:
        core = self._core
        with core.changed:
            state = core.state
            first = merged.round.first_arrival or merged.sealed
            members = [
                SyncMember(
                    learner=name,
                    generation=arrival.generation
                    if (arrival := merged.round.arrivals.get(name))
                    else member.generation,
                    state=member.state,
                    arrived_seconds=arrival.when - first if arrival else None,
                    samples=arrival.samples if arrival else 0,
                )
                for name, member in sorted(state.members.items())
            ]
            ledger = state.ledger if state.version == merged.round.number else step(state, event)[0].ledger
            return SyncMerged(
                time=core.journal.now(),
                source="syncer",
                round=merged.round.number,
                epoch=state.epoch,
                members=members,
                open_seconds=merged.sealed - first,
                merge_seconds=merged.seconds,
                durable_seconds=durable_seconds,
                outer_gradient_norm=merged.result.gradient_norm,
                cosine=merged.result.cosine,
                samples_total=ledger.samples_total,
                theta_sha256=event.theta_sha256,
                model_sha256=event.model_sha256,
                bytes_in=merged.size,
                final=ledger.final,
            )
