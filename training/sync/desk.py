"""What learners ask the syncer for, as plain calls; `control` and `bulk` put them on sockets."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import BinaryIO

from training.sync.core import Core
from training.sync.describe import describe_status
from training.sync.events import (
    Answer,
    Contributed,
    Drained,
    Effect,
    Heartbeat,
    Leave,
    Refuse,
    Register,
    Seeded,
    Wait,
)
from training.sync.layout import Floats, Layout, fingerprint_weights
from training.sync.machine import look_up, step
from training.sync.messages import (
    Answered,
    Contribution,
    DrainedArgs,
    FragmentPlace,
    HeartbeatArgs,
    HeartbeatReply,
    LeaveArgs,
    PartHeader,
    RegisterArgs,
    Registration,
    SeedHeader,
    Status,
    Verdict,
    encode,
)
from training.sync.outer import OuterState
from training.sync.refusals import Refusal
from training.sync.staging import Assembled, Slot
from training.sync.state import FragmentState

_LONGEST_WAIT = 30.0


class Desk:
    """Answers learners, from any thread. `Refusal` and `OSError` are the only errors that it means to raise."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._seeding = threading.Lock()

    def register(self, args: RegisterArgs) -> Registration:
        """A new generation of a learner, durable before it is answered."""
        layout = self._read_layout(args.shapes, args.buffers, args.fingerprint)
        core = self._core
        with core.changed:
            rules = core.state.rules
            if args.contract != rules.contract:
                hint = "start all learners and the syncer from the same plan"
                raise Refusal(
                    "contract",
                    f"learner {args.learner!r} was started with other sync settings than run {rules.run}",
                    hint=hint,
                )
            before = core.state, core.layout
            core.set_layout(layout)
            try:
                core.apply(Register(now=core.clock(), learner=args.learner))
            except (Refusal, OSError):
                core.state, core.layout = before
                raise
            return self._describe(args.learner)

    def heartbeat(self, args: HeartbeatArgs) -> HeartbeatReply:
        """A sign of life."""
        core = self._core
        with core.changed:
            event = Heartbeat(
                now=core.clock(),
                learner=args.learner,
                generation=args.generation,
                step=args.step,
                pending=args.pending,
                kept=args.kept,
                step_seconds=args.step_seconds,
                in_flight_steps=args.in_flight_steps,
                blocked_seconds=args.blocked_seconds,
                measures=args.measures,
            )
            core.apply(event)
            state = core.state
            return HeartbeatReply(
                epoch=state.epoch,
                version=state.version,
                final=state.ledger.final,
                draining=state.ledger.draining,
                versions=state.versions,
                remaining=state.remaining,
            )

    def drained(self, args: DrainedArgs) -> None:
        """A learner of a run that is draining has nothing more to send."""
        core = self._core
        with core.changed:
            core.apply(Drained(now=core.clock(), learner=args.learner, generation=args.generation))

    def leave(self, args: LeaveArgs) -> None:
        """An orderly end: the learner is not waited for, and what it discarded is booked."""
        core = self._core
        with core.changed:
            event = Leave(
                now=core.clock(),
                learner=args.learner,
                generation=args.generation,
                discarded=tuple(args.discarded or [args.discarded_samples]),
            )
            core.apply(event)
            core.emit_ledger()

    def check_seed(self, header: SeedHeader) -> Layout | None:
        """The layout of a seed that would be taken; none if exactly this seed was taken before."""
        layout = self._read_layout(header.shapes, header.buffers, header.fingerprint)
        core = self._core
        with core.changed:
            home = core.state.rules.home
            if header.learner != home:
                raise Refusal("seed_refused", f"only learner {home!r} seeds version 0, not {header.learner!r}")
            self._check_generation(header.learner, header.generation)
            if core.state.ledger.seed_sha256 == header.sha256:
                return None
            if core.state.version >= 0:
                message = f"version {core.state.version} is committed; a seed is taken for version 0 only"
                raise Refusal("seed_refused", message, hint="adopt the shared weights")
            core.set_layout(layout)
            return layout

    def seed(self, header: SeedHeader, *, theta: Floats, ema: Floats | None) -> None:
        """Commit version 0, once."""
        core = self._core
        with self._seeding:
            if self.check_seed(header) is None:
                return
            arrays = _cut(core.require_layout(), theta=theta, average=theta.copy() if ema is None else ema)
            event = Seeded(
                now=core.clock(),
                seed_sha256=header.sha256,
                theta_sha256=tuple(fingerprint_weights(one.outer.theta) for one in arrays),
                fingerprint=header.fingerprint,
                model_sha256="" if ema is None else core.publish_model([one.average for one in arrays], version=0),
            )
            with core.changed:
                ledger = step(core.state, event)[0].durable()
            written = {
                fragment: core.write_fragment(ledger, one, fragment=fragment, event="")
                for fragment, one in enumerate(arrays)
            }
            with core.changed:
                self._check_generation(header.learner, header.generation)
                core.apply(event, save=lambda newest: core.store.commit(newest, states=written))
                core.arrays = arrays
            core.journal.note(f"learner {header.learner} seeded version 0")

    def reserve_part(self, header: PartHeader) -> Slot | None:
        """Room for a part that is about to be received; none if it is here or answered."""
        core = self._core
        with core.changed:
            self._check_generation(header.learner, header.generation)
            if not core.arrays:
                raise Refusal("unseeded", "version 0 is not committed yet")
            agreed = core.settings.config.codec, core.settings.config.ema == "learners"
            if (header.codec, header.has_ema) != agreed:
                averages = "without" if header.has_ema else "with"
                text = f"the part is {header.codec}, this run's are {agreed[0]}"
                if header.has_ema != agreed[1]:
                    text = f"this run's parts come {averages} averaged weights"
                raise Refusal("codec", text, hint="start all learners and the syncer from the same plan")
            if self._is_answered(header.learner, header.generation, header.seq, fragment=header.fragment):
                return None
            found = look_up(
                core.state,
                learner=header.learner,
                generation=header.generation,
                seq=header.seq,
                digest="",
                fragment=header.fragment,
            )
            if isinstance(found, Refuse) and found.reason in {"contribution_pending", "bad_request"}:
                raise Refusal(found.reason, found.message)
            # Under the lock: between this look and the reservation nothing may be accepted that the part would replace.
            return core.staging.reserve(header, layout=core.require_layout())

    def find_upload(self, key: str) -> Slot | None:
        """The room that waits for a body, by the key its opening was answered with."""
        return self._core.staging.find(key)

    def finish_part(self, slot: Slot) -> None:
        """The part was received and verified."""
        self._core.staging.finish(slot)

    def reserve_seed(self, header: SeedHeader) -> Slot | None:
        """Room for the initial weights; none if exactly these were taken before."""
        layout = self.check_seed(header)
        return None if layout is None else self._core.staging.reserve_seed(header, layout=layout)

    def finish_seed(self, slot: Slot) -> None:
        """The initial weights were received and verified: commit version 0."""
        header, values = slot.header, slot.upload.data.view("<f4")
        assert isinstance(header, SeedHeader)
        cut = len(values) // (2 if header.has_ema else 1)
        self.seed(header, theta=values[:cut], ema=values[cut:] if header.has_ema else None)
        self._core.staging.finish(slot)

    def part_state(self, *, learner: str, generation: int, fragment: int, seq: int, rank: int) -> str:
        """`answered`, `held` or `missing`: whether the sender may forget a part, keeps it, or sends it again."""
        with self._core.changed:
            if self._is_answered(learner, generation, seq, fragment=fragment):
                return "answered"
        held = self._core.staging.holds(learner=learner, generation=generation, fragment=fragment, seq=seq, rank=rank)
        return "held" if held else "missing"

    def commit(self, contribution: Contribution, *, wait_seconds: float) -> Verdict | None:
        """The verdict on a contribution, or none if there is none after the wait."""
        core = self._core
        digest = hashlib.sha256(encode(contribution)).hexdigest()
        until = time.monotonic() + min(wait_seconds, _LONGEST_WAIT)
        data: Assembled | None = None
        while True:
            with core.changed:
                found: Effect | None = look_up(
                    core.state,
                    learner=contribution.learner,
                    generation=contribution.generation,
                    seq=contribution.seq,
                    digest=digest,
                    fragment=contribution.fragment,
                )
                if found is None and data is not None:
                    found = self._offer(contribution, digest, data)
                if isinstance(found, Refuse):
                    raise Refusal(found.reason, found.message)
                if isinstance(found, Answer):
                    return self._answer(contribution, found.answered)
                if data is not None or isinstance(found, Wait):
                    self._check_stopping()
                    left = until - time.monotonic()
                    if left <= 0:
                        return None
                    core.changed.wait(left)
                    continue
                layout = core.require_layout()
            data = core.staging.assemble(contribution, layout=layout)

    def wait_version(self, at_least: int, *, wait_seconds: float) -> Status:
        """The status as soon as the version is reached, or after the wait."""
        core = self._core
        with core.changed:
            core.changed.wait_for(
                lambda: core.state.version >= at_least or core.stopping.is_set(),
                timeout=min(wait_seconds, _LONGEST_WAIT),
            )
            self._check_stopping()
            return self.status()

    def weights(self, version: int, *, fragment: int = 0, learner: str = "") -> tuple[Floats, int]:
        """A fragment's weights of its version, and its first element; earlier ones while their state is kept. It is
        while `learner` asks for more of it.
        """
        core = self._core
        layout = core.require_layout()
        if fragment >= layout.fragments:
            raise Refusal("bad_request", f"there is no fragment {fragment} of {layout.fragments}")
        first = layout.fragment_range(fragment)[0]
        with core.changed:
            current = core.state.versions[fragment]
            newest = core.arrays[fragment].outer.theta if core.arrays else None
            if learner in core.state.members and 0 <= version <= current:
                core.fetches[learner, fragment] = version, core.clock()
        if newest is not None and version == current:
            return newest, first
        earlier = core.store.read_version(version, fragment=fragment) if 0 <= version < current else None
        if earlier is None:
            raise Refusal(
                "unknown_version",
                f"version {version} of fragment {fragment} is not here; the newest is {current}",
                hint="adopt the newest version",
            )
        return earlier, first

    def sent(self, learner: str, size: int) -> None:
        """Weights went to a learner."""
        with self._core.changed:
            if learner in self._core.state.members:
                self._core.sent[learner] += size

    def open_model(self, digest: str) -> BinaryIO:
        """A published model's file, while it is kept."""
        return self._core.store.files.model(digest).open("rb")

    def status(self) -> Status:
        """Which round, who is waited for, and until when."""
        with self._core.changed:
            return describe_status(self._core)

    def metrics(self, status: Status) -> bytes:
        """The status and the merges so far in Prometheus' text form."""
        with self._core.changed:
            return self._core.metrics.render(status, verdicts=self._core.verdicts)

    def _read_layout(self, shapes: dict[str, list[int]], buffers: dict[str, list[int]], fingerprint: str) -> Layout:
        try:
            layout = Layout.from_shapes(shapes, buffers=buffers, fragments=self._core.settings.config.fragments)
        except ValueError as error:
            raise Refusal("bad_request", f"the layout cannot be: {error}") from error
        if layout.fingerprint != fingerprint:
            raise Refusal("layout", "names and shapes do not have the fingerprint they were sent with")
        with self._core.changed:
            known = self._core.state.ledger.fingerprint
        if known and known != fingerprint:
            message = f"the model has another layout ({fingerprint[:12]}) than this run ({known[:12]})"
            raise Refusal("layout", message, hint="all learners of a run train the same model")
        return layout

    def _check_stopping(self) -> None:
        """Who waits comes again after a pause, and not at once, as often as it can."""
        if self._core.stopping.is_set():
            raise Refusal("stopping", "this syncer ends", hint="its successor answers at the same address")

    def _check_generation(self, learner: str, generation: int) -> None:
        found = look_up(self._core.state, learner=learner, generation=generation, seq=0, digest="")
        if isinstance(found, Answer) and found.answered.kind == "fenced":
            raise Refusal("fenced", found.answered.reason)
        if isinstance(found, Refuse) and found.reason == "unregistered":
            raise Refusal(found.reason, found.message)

    def _is_answered(self, learner: str, generation: int, seq: int, *, fragment: int) -> bool:
        member = self._core.state.members.get(learner)
        if member is None or not 0 <= fragment < len(member.record.places):
            return False
        known = member.record.places[fragment].answered
        return known is not None and known.generation == generation and known.seq >= seq

    def _offer(self, contribution: Contribution, digest: str, data: Assembled) -> Effect | None:
        core = self._core
        learner, generation, seq = contribution.learner, contribution.generation, contribution.seq
        if not core.staging.is_current(learner, generation=generation, seq=seq, fragment=contribution.fragment):
            raise Refusal("superseded", f"a newer contribution of learner {learner!r} is on its way")
        problem = data.problem
        if contribution.fingerprint != core.require_layout().fingerprint:
            problem = f"it was cut from another layout ({contribution.fingerprint[:12]})"
        elif not problem and core.settings.config.ema == "learners" and not len(data.ema):
            problem = "it has no averaged weights, which this run publishes"
        event = Contributed(
            now=core.clock(),
            learner=contribution.learner,
            generation=contribution.generation,
            seq=contribution.seq,
            digest=digest,
            base_version=contribution.base_version,
            samples=contribution.samples,
            cursor=contribution.cursor,
            norm=data.norm,
            fragment=contribution.fragment,
            steps=contribution.steps,
            discarded_samples=contribution.discarded_samples,
            loss=contribution.inner_loss,
            last=contribution.last,
            problem=problem,
        )
        effects = core.apply(event)
        return next((one for one in effects if isinstance(one, (Answer, Refuse, Wait))), None)

    def _answer(self, contribution: Contribution, answered: Answered) -> Verdict:
        core = self._core
        fragment, ledger = contribution.fragment, core.state.ledger
        if answered.kind == "fenced":
            core.verdicts["fenced"] += 1
        else:
            core.staging.drop(
                contribution.learner, generation=contribution.generation, seq=contribution.seq, fragment=fragment
            )
        record = ledger.fragments[fragment]
        return Verdict(
            kind=answered.kind,
            version=record.version,
            samples_total=ledger.samples_total,
            final=ledger.final,
            theta_sha256=record.theta_sha256,
            reason=answered.reason,
            round=answered.round,
            round_members=answered.round_members,
            fragment=fragment,
            draining=ledger.draining,
            staleness=answered.staleness,
            quarantined=core.state.members[contribution.learner].state == "quarantined",
        )

    def _describe(self, learner: str) -> Registration:
        core = self._core
        state, ledger = core.state, core.state.ledger
        record = state.members[learner].record
        fragments = [
            FragmentPlace(
                version=fragment.version,
                last_seq=place.last_seq,
                cursor=place.cursor,
                merged_samples=place.merged_samples,
                discarded_samples=place.discarded_samples,
                contribution_pending=bool(state.rounds) and learner in state.rounds[index].arrivals,
                theta_sha256=fragment.theta_sha256,
            )
            for index, (fragment, place) in enumerate(zip(ledger.fragments, record.places, strict=True))
        ]
        return Registration(
            generation=record.generation,
            epoch=state.epoch,
            version=ledger.version,
            samples_total=ledger.samples_total,
            last_seq=max(one.last_seq for one in fragments),
            cursor=min(one.cursor for one in fragments),
            merged_samples=record.merged_samples,
            discarded_samples=record.discarded_samples,
            contribution_pending=any(one.contribution_pending for one in fragments),
            seed_needed=ledger.version < 0 and learner == state.rules.home,
            final=ledger.final,
            theta_sha256=ledger.theta_sha256,
            fragments=fragments,
            draining=ledger.draining,
        )


def _cut(layout: Layout, *, theta: Floats, average: Floats) -> list[FragmentState]:
    """Version 0 of each fragment."""
    places = [layout.fragment_range(fragment) for fragment in range(layout.fragments)]
    return [
        FragmentState(outer=OuterState.start(theta[start : start + length]), average=average[start : start + length])
        for start, length in places
    ]
