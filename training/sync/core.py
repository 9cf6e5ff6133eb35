"""What all threads of the syncer share: the machine's state behind one lock, and the arrays, files and events that
belong to it.

Promises that a new state is seen by nobody before what it wants durable is durable. Long work (merging, hashing,
writing weights) happens outside the lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from msgspec.structs import replace as change

from spec.events import SyncFragmentLedger, SyncLedger, SyncMerged, SyncWaiting, read_event
from spec.plan import Plan, SyncerPlan
from training.sync.contract import contract_hash
from training.sync.events import Announce, Answer, Effect, Event, Refuse, Remark, SaveLedger
from training.sync.journal import Journal
from training.sync.layout import Floats, Layout
from training.sync.machine import step
from training.sync.members import Rules, State, recover
from training.sync.messages import Ledger
from training.sync.metrics import SyncMetrics
from training.sync.publish import write_model
from training.sync.refusals import Refusal
from training.sync.staging import Staging
from training.sync.state import FragmentState, StateNote, write_state
from training.sync.store import DeposedError, Store
from training.sync.tensors import Written

_LOG = logging.getLogger(__name__)
FETCH_SECONDS = 120.0
"""Longest pause between two pieces of a fetch: all connections of a learner have one of 8 MiB under way."""


class Core:
    """One run, held by this process. Fields are read and written under `changed`, which waiters sleep on."""

    def __init__(self, plan: Plan, *, store: Store, journal: Journal, clock: Callable[[], float]) -> None:
        contract = contract_hash(plan)
        assert plan.syncer is not None
        self.plan = plan
        self.settings: SyncerPlan = plan.syncer
        self.store, self.journal, self.clock = store, journal, clock
        self.changed = threading.Condition(threading.RLock())
        self.stopping = threading.Event()
        self.staging = Staging()
        self.verdicts: Counter[str] = Counter()
        """Contributions that this process answered, by kind."""
        self.metrics = SyncMetrics()
        journal.observers.append(self.metrics.observe)
        self.received: Counter[str] = Counter()
        """Bytes of merged contributions, by learner."""
        self.rates: dict[str, float] = {}
        """Bytes per second at which the last merged contribution of a learner came."""
        self.sent: Counter[str] = Counter()
        """Bytes of weights, by learner."""
        self.fetches: dict[tuple[str, int], tuple[int, float]] = {}
        """By learner and fragment: the version it asked for last, and when."""
        self.merges: dict[int, SyncMerged] = {}
        """The last merge of each fragment that this process knows of."""
        self.alarm = ""
        self.failure: BaseException | None = None
        loaded = store.take_over(Ledger(run=plan.run, contract=contract))
        self.arrays: list[FragmentState] = [arrays for arrays, _ in loaded]
        """By fragment; none before version 0."""
        self.layout: Layout | None = loaded[0][1].layout if loaded else None
        rules = make_rules(plan, self.settings, contract=contract)
        self.state: State = recover(rules, store.head.ledger, epoch=store.head.epoch, now=clock())
        journal.note(f"syncer serves run {plan.run}: version {self.state.version}, epoch {self.state.epoch}")
        if loaded:
            self._repeat_event([note for _, note in loaded])

    def require_layout(self) -> Layout:
        """What the run's weights look like."""
        if self.layout is None:
            raise Refusal("unseeded", "no learner has registered since the syncer started, so the layout is unknown")
        return self.layout

    def set_layout(self, layout: Layout) -> None:
        """The first registration decides."""
        self.layout = self.layout or layout
        if not self.state.ledger.fingerprint:
            self.state = replace(self.state, ledger=change(self.state.ledger, fingerprint=layout.fingerprint))

    def apply(self, event: Event, *, save: Callable[[Ledger], None] | None = None) -> tuple[Effect, ...]:
        """Let the machine take one event and carry out its effects; `save` replaces the plain write of HEAD."""
        after, effects = step(self.state, event)
        for effect in effects:
            if isinstance(effect, Refuse):
                raise Refusal(effect.reason, effect.message)
        if any(isinstance(effect, SaveLedger) for effect in effects):
            try:
                (save or self.store.commit)(after.durable())
            except DeposedError as error:
                self.fail(error)
                raise Refusal("stopping", error.message, hint=error.hint) from error
        self.state = after
        for effect in effects:
            if isinstance(effect, Remark):
                self.journal.note(effect.text, level=effect.level)
            if isinstance(effect, Answer):
                self.verdicts[effect.answered.kind] += 1
            if isinstance(effect, Announce):
                self._announce(effect.fragment)
        self.changed.notify_all()
        return effects

    def fail(self, error: BaseException) -> None:
        """End the process: somebody else has the run, or a bug was hit."""
        self.failure = self.failure or error
        self.stop()

    def stop(self) -> None:
        """Wake everybody who waits; nothing new is begun."""
        self.stopping.set()
        with self.changed:
            self.changed.notify_all()

    def raise_alarm(self, text: str) -> None:
        """Something that a person has to mend keeps the syncer from going on."""
        self.alarm = text
        self.journal.note(text, level="error")

    def being_fetched(self) -> set[tuple[int, int]]:
        """(fragment, version) that learners are fetching: a slow link needs longer than some merges take, and whose
        version is gone begins anew. At most one of each learner and fragment.
        """
        since = self.clock() - FETCH_SECONDS
        return {(fragment, version) for (_, fragment), (version, when) in self.fetches.items() if when > since}

    def until(self, fragment: int = 0) -> float | None:
        """Seconds since 1970 at which the open round of a fragment may close."""
        current = self.state.round(fragment)
        if current is None or current.deadline is None:
            return None
        return self.journal.now() + current.deadline - self.clock()

    def emit_ledger(self) -> None:
        """The committed count of samples."""
        records = [one.record for _, one in sorted(self.state.members.items())]
        event = SyncLedger(
            time=self.journal.now(),
            source="syncer",
            round=self.state.version,
            merged={one.learner: one.merged_samples for one in records},
            discarded={one.learner: one.discarded_samples for one in records},
            fragments=[
                SyncFragmentLedger(
                    merged={one.learner: one.places[fragment].merged_samples for one in records},
                    discarded={one.learner: one.places[fragment].discarded_samples for one in records},
                )
                for fragment in range(self.state.rules.fragments)
            ],
            final=self.state.ledger.final,
            model_sha256=self.state.ledger.model_sha256 or None,
        )
        self.journal.emit(event)

    def publish_model(self, averages: Sequence[Floats], *, version: int) -> str:
        """Write the averaged model from its fragments; its digest."""
        train = self.plan.train
        written = write_model(
            averages[0] if len(averages) == 1 else np.concatenate(averages),
            layout=self.require_layout(),
            config=train.model.model_dump_json() if train else "{}",
            version=version,
            experiment=self.plan.experiment,
            folder=self.store.models,
            point=self.store.point,
        )
        self.store.keep(written)
        return written.sha256

    def write_fragment(self, ledger: Ledger, arrays: FragmentState, *, fragment: int, event: str) -> Written:
        """Make a fragment's state outlive this process, before HEAD names it."""
        layout = self.require_layout()
        note = StateNote(
            ledger=ledger,
            epoch=self.state.epoch,
            rounds_accumulated=arrays.outer.rounds_accumulated,
            shapes=layout.shapes(),
            buffers=layout.buffer_shapes(),
            fragment=fragment,
            fragments=layout.fragments,
            event=event,
        )
        written = write_state(arrays, note=note, folder=self.store.states, point=self.store.point)
        self.store.keep(written)
        return written

    def _announce(self, fragment: int) -> None:
        current = self.state.round(fragment)
        if current is None or current.stage != "OPEN":
            return
        event = SyncWaiting(
            time=self.journal.now(),
            source="syncer",
            round=current.number,
            fragment=fragment,
            arrived=sorted(current.arrivals),
            waiting_for=self.state.waiting_for(fragment),
            deadline=self.until(fragment),
        )
        self.journal.emit(event)

    def _repeat_event(self, notes: Sequence[StateNote]) -> None:
        """A crash between commit and event must not lose the event; it must not appear twice either."""
        events = [(one.fragment, read_event(one.event)) for one in notes if one.event]
        self.merges = {fragment: event for fragment, event in events if isinstance(event, SyncMerged)}
        for event in self.merges.values():
            if event.round == self.state.version and not self.journal.has_merged(event.round):
                self.journal.emit(event)
        self.emit_ledger()


def make_rules(plan: Plan, settings: SyncerPlan, *, contract: str) -> Rules:
    """The machine's part of the plan."""
    config = settings.config
    return Rules(
        run=plan.run,
        contract=contract,
        learners=tuple(one.name for one in plan.learners),
        target_samples=settings.target_samples,
        mode=config.mode,
        fragments=config.fragments,
        inner_steps=config.inner_steps,
        quorum=config.quorum,
        grace_share=config.grace_share,
        round_deadline=config.round_deadline,
        lease=config.lease,
        barrier_timeout=config.barrier_timeout,
    )
