"""What the syncer does by itself: merge a sealed round, commit it, publish it, and let leases and deadlines run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spec.events import SyncMember, SyncMerged, write_event
from training.sync.core import Core
from training.sync.events import Committed, Finished, MergeDone, Published, Tick
from training.sync.layout import Floats, fingerprint_weights
from training.sync.machine import step
from training.sync.members import SOFT_STALENESS, Round
from training.sync.merge import Displacement, MergeResult, MergeRules, average_models, follow, merge
from training.sync.outer import Spare
from training.sync.pieces import Raised
from training.sync.refusals import Refusal
from training.sync.staging import Assembled, Journey
from training.sync.state import FragmentState
from training.sync.store import DeposedError
from training.sync.tensors import Written

_LOG = logging.getLogger(__name__)
_LONGEST_RETRY = 30.0


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """A merged round that is not committed yet."""

    round: Round
    result: MergeResult
    average: Floats
    share: float
    seconds: float
    journeys: dict[str, Journey]
    """Of each contribution."""

    @property
    def size(self) -> int:
        """Bytes of all contributions as they came."""
        return sum(one.size for one in self.journeys.values())

    @property
    def arrays(self) -> FragmentState:
        return FragmentState(outer=self.result.outer, average=self.average)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A merge that outlives this process, and what HEAD will say of it."""

    event: Committed
    written: Written


class Worker:
    """The one thread that moves sealed rounds on, one after the other."""

    def __init__(self, core: Core, *, retry_seconds: float) -> None:
        self._core = core
        self._retry_seconds = retry_seconds
        self._spare = Spare()
        config = core.settings.config
        self._rules = MergeRules(
            learning_rate=config.outer_learning_rate,
            momentum=config.outer_momentum,
            round_samples=core.settings.round_samples,
            weighting=config.weighting,
        )

    def tick(self) -> None:
        """Let leases and deadlines run, and forget what came from processes that are fenced or gone."""
        core = self._core
        with core.changed:
            core.apply(Tick(now=core.clock()))
            core.staging.keep_only(core.state.may_be_merged, seed=core.state.version < 0)

    def check_store(self) -> None:
        """End if another syncer has taken over."""
        try:
            self._core.store.check()
        except DeposedError as error:
            self._core.fail(error)
        except OSError as error:
            _LOG.warning("the store cannot be read: %s", error)

    def work_once(self, *, wait_seconds: float = 0.0) -> bool:
        """Take one round from SEALED to published, or a drained run to its end, if there is such work within the wait;
        whether there was.
        """
        core = self._core
        with core.changed:
            core.changed.wait_for(lambda: self._has_work() or core.stopping.is_set(), timeout=wait_seconds)
            sealed, finishing = self._sealed(), core.state.finishing
            if core.stopping.is_set() or not core.arrays:
                return False
        with core.metrics.working():
            return self._work(sealed) if sealed else finishing and self._insist("the final model", self._finish)

    def _work(self, sealed: Round) -> bool:
        core = self._core
        core.store.point("sealed")
        merged = self._merge(sealed)
        with core.changed:
            core.apply(MergeDone(now=core.clock(), fragment=sealed.fragment))
        core.store.point("merged")
        part = f" of fragment {sealed.fragment}" if core.state.rules.fragments > 1 else ""
        kept: list[_Kept] = []

        def commit() -> None:
            # Once: HEAD may name this file though nobody could tell us, so it is not written again with other bytes.
            if not kept:
                kept.append(self._keep(merged))
            self._commit(merged, kept[0])

        return self._insist(f"version {sealed.number}{part}", commit)

    def _has_work(self) -> bool:
        return self._sealed() is not None or self._core.state.finishing

    def _sealed(self) -> Round | None:
        """The round that has waited longest."""
        sealed = [one for one in self._core.state.rounds if one.stage == "SEALED"]
        return min(sealed, key=lambda one: (one.sealed or 0.0, one.fragment), default=None)

    def _insist(self, what: str, work: Callable[[], None]) -> bool:
        """Do it again until the store takes it; whether it did."""
        core, retry = self._core, self._retry_seconds
        while not core.stopping.is_set():
            try:
                work()
            except OSError as error:
                core.raise_alarm(f"{what} is not committed and not published: {error}; next try in {retry:g} s")
                core.stopping.wait(retry)
                retry = min(2 * retry, _LONGEST_RETRY)
            except Refusal:
                return False
            else:
                core.alarm = ""
                return True
        return False

    def _merge(self, sealed: Round) -> _Merged:
        core, started, fragment = self._core, self._core.clock(), sealed.fragment
        outer, names = core.arrays[fragment].outer, sorted(sealed.arrivals)
        taken = {name: core.staging.take(name, fragment=fragment) for name in names}
        shares = [
            Displacement(
                learner=name,
                delta=taken[name][0].delta,
                samples=sealed.arrivals[name].samples,
                staleness=sealed.staleness(name),
            )
            for name in names
        ]
        share = sealed.share if core.state.rules.decoupled else 1.0
        result = merge(
            outer,
            shares,
            rules=replace(self._rules, soft_staleness=SOFT_STALENESS * max(1, sealed.active)),
            frac=share,
            trainable=core.require_layout().trainable_in(fragment),
            spare=self._spare,
        )
        average = self._average(sealed, {name: one for name, (one, _) in taken.items()}, theta=result.outer.theta)
        return _Merged(
            round=sealed,
            result=result,
            average=average,
            share=share,
            seconds=core.clock() - started,
            journeys={name: journey for name, (_, journey) in taken.items()},
        )

    def _average(self, sealed: Round, taken: dict[str, Assembled], *, theta: Floats) -> Floats:
        """The fragment's averaged weights after the merge: they move by the share of a full round that the merge is."""
        core = self._core
        share = sealed.share if core.state.rules.decoupled else 1.0
        before = core.arrays[sealed.fragment]
        if core.settings.config.ema == "syncer":
            steps = sum(one.steps for one in sealed.arrivals.values()) / len(sealed.arrivals)
            beta = core.plan.train.ema_decay if core.plan.train else 0.0
            return follow(before.average, theta, decay=beta ** (share * steps), out=self._take_spare(theta))
        # Averages come as displacements from the learner's base. Put on the newest weights, as a rebase does, they are
        # exact in a barrier and need no earlier version otherwise.
        averages = [
            (name, Raised(base=before.outer.theta, displacement=one.ema), sealed.arrivals[name].samples)
            for name, one in taken.items()
        ]
        newest = average_models(
            averages, round_samples=core.settings.round_samples, out=self._take_spare(before.average)
        )
        return newest if share == 1 else follow(before.average, newest, decay=1 - share, out=newest)

    def _take_spare(self, like: Floats) -> Floats:
        found: Any = self._spare.take(like)
        return found

    def _keep(self, merged: _Merged) -> _Kept:
        """Write the merge where it outlives this process; nobody refers to it yet."""
        core, started, fragment = self._core, self._core.clock(), merged.round.fragment
        arrays = merged.arrays
        event = Committed(
            now=started, fragment=fragment, theta_sha256=fingerprint_weights(arrays.outer.theta), model_sha256=""
        )
        with core.changed:
            booked = step(core.state, event)[0]
        if self._publishes(merged, final=booked.ledger.final):
            averages = [one.average for one in core.arrays]
            averages[fragment] = arrays.average
            event = replace(event, model_sha256=core.publish_model(averages, version=booked.version))
        with core.changed:
            ledger = step(core.state, event)[0].durable()
        line = self._describe(merged, event, durable_seconds=core.clock() - started)
        written = core.write_fragment(ledger, arrays, fragment=fragment, event=write_event(line))
        return _Kept(event=event, written=written)

    def _commit(self, merged: _Merged, kept: _Kept) -> None:
        """DURABLE comes before published: HEAD names the state, then the new weights are served and verdicts given."""
        core, fragment, event = self._core, merged.round.fragment, kept.event
        arrays, before = merged.arrays, core.arrays[fragment]
        with core.changed:
            core.apply(event, save=lambda newest: core.store.commit(newest, states={fragment: kept.written}))
            durable = core.clock()
            core.store.point("durable")
            core.arrays[fragment] = arrays
            core.merges[fragment] = self._describe(
                merged, event, durable_seconds=durable - event.now, state_bytes=kept.written.size
            )
            core.journal.emit(core.merges[fragment])
            core.emit_ledger()
            for arrival in merged.round.arrivals.values():
                core.staging.drop(arrival.learner, generation=arrival.generation, seq=arrival.seq, fragment=fragment)
            for name, journey in merged.journeys.items():
                core.received[name] += journey.size
                core.rates[name] = journey.size / max(journey.seconds, 1e-6)
            core.apply(Published(now=core.clock(), fragment=fragment))
            core.metrics.publishing.observe(core.clock() - durable)
        core.store.point("published")
        self._retire(before, kept=arrays)
        self._prune()

    def _publishes(self, merged: _Merged, *, final: bool) -> bool:
        """A model is published when all fragments have been through a full round, and at the end."""
        last = merged.round.fragment == self._core.state.rules.fragments - 1
        return final or (last and merged.result.outer.rounds_accumulated == 0)

    def _retire(self, before: FragmentState, *, kept: FragmentState) -> None:
        """Memory for the next merge: of what only this thread reads. Former weights may still be on their way out."""
        still = {id(kept.outer.momentum), id(kept.outer.accumulated), id(kept.average)}
        ours = (before.outer.momentum, before.outer.accumulated, before.average)
        self._spare.give(*(one for one in ours if id(one) not in still))

    def _finish(self) -> None:
        """The end of a run that has drained: its model, then HEAD."""
        core = self._core
        digest = core.publish_model([one.average for one in core.arrays], version=core.state.version)
        with core.changed:
            core.apply(Finished(now=core.clock(), model_sha256=digest))
            core.emit_ledger()
        self._prune()

    def _prune(self) -> None:
        core = self._core
        with core.changed:  # of a final run nobody needs anything but the last version
            wanted = set[tuple[int, int]]() if core.state.ledger.final else core.being_fetched()
        try:
            core.store.prune(wanted=wanted)
        except OSError as error:
            _LOG.warning("old states cannot be removed: %s", error)

    def _describe(
        self, merged: _Merged, event: Committed, *, durable_seconds: float, state_bytes: int = 0
    ) -> SyncMerged:
        core, current = self._core, merged.round
        with core.changed:
            state = core.state
            booked = state if state.versions[current.fragment] == current.number else step(state, event)[0]
            sealed = current.sealed or 0.0
            first = current.first_arrival or sealed
            members = [
                SyncMember(
                    learner=name,
                    generation=arrival.generation if (arrival := current.arrivals.get(name)) else member.generation,
                    state=member.state,
                    arrived_seconds=arrival.when - first if arrival else None,
                    samples=arrival.samples if arrival else 0,
                    staleness=current.staleness(name) if arrival else 0,
                    norm=arrival.norm if arrival else 0.0,
                    loss=arrival.loss if arrival else None,
                )
                for name, member in sorted(state.members.items())
            ]
            return SyncMerged(
                time=core.journal.now(),
                source="syncer",
                round=booked.version,
                fragment=current.fragment,
                fragment_version=current.number,
                epoch=state.epoch,
                members=members,
                open_seconds=sealed - first,
                grace_seconds=current.grace,
                merge_seconds=merged.seconds,
                durable_seconds=durable_seconds,
                outer_gradient_norm=merged.result.gradient_norm,
                cosine=merged.result.cosine,
                mean_cosine=merged.result.mean_cosine,
                momentum_cosine=merged.result.momentum_cosine,
                share=merged.share,
                samples_total=booked.ledger.samples_total,
                theta_sha256=booked.ledger.theta_sha256,
                fragment_sha256=event.theta_sha256,
                model_sha256=event.model_sha256 or None,
                bytes_in=merged.size,
                state_bytes=state_bytes,
                final=booked.ledger.final,
            )
