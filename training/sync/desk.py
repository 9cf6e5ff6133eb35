"""What learners ask the syncer for, as plain calls; `control` and `bulk` put them on sockets."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import BinaryIO

from training.sync.core import Core
from training.sync.events import Answer, Contributed, Effect, Heartbeat, Leave, Refuse, Register, Seeded, Wait
from training.sync.layout import Floats, Layout, fingerprint_weights
from training.sync.machine import look_up, step
from training.sync.messages import (
    Answered,
    Contribution,
    HeartbeatArgs,
    HeartbeatReply,
    LeaveArgs,
    MemberStatus,
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
from training.sync.state import write_state

_LONGEST_WAIT = 30.0


class Desk:
    """Answers learners, from any thread. `Refusal` and `OSError` are the only errors that it means to raise."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._seeding = threading.Lock()

    def register(self, args: RegisterArgs) -> Registration:
        """A new generation of a learner, durable before it is answered."""
        layout = self._read_layout(args.shapes, args.fingerprint)
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
                step_seconds=args.step_seconds,
            )
            core.apply(event)
            return HeartbeatReply(epoch=core.state.epoch, version=core.state.version, final=core.state.ledger.final)

    def leave(self, args: LeaveArgs) -> None:
        """An orderly end: the learner is not waited for, and what it discarded is booked."""
        core = self._core
        with core.changed:
            event = Leave(
                now=core.clock(),
                learner=args.learner,
                generation=args.generation,
                discarded_samples=args.discarded_samples,
            )
            core.apply(event)
            core.emit_ledger()

    def check_seed(self, header: SeedHeader) -> Layout | None:
        """The layout of a seed that would be taken; none if exactly this seed was taken before."""
        layout = self._read_layout(header.shapes, header.fingerprint)
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
            outer = OuterState.start(theta)
            event = Seeded(
                now=core.clock(),
                seed_sha256=header.sha256,
                theta_sha256=fingerprint_weights(theta),
                fingerprint=header.fingerprint,
                model_sha256="" if ema is None else core.publish_model(ema, version=0),
            )
            with core.changed:
                note = core.note(step(core.state, event)[0].durable(), outer, event="")
            written = write_state(outer, note=note, folder=core.store.states, point=core.store.point)
            core.store.keep(written)
            with core.changed:
                self._check_generation(header.learner, header.generation)
                core.apply(event, save=lambda newest: core.store.commit(newest, state=written))
                core.outer = outer
            core.journal.note(f"learner {header.learner} seeded version 0")

    def reserve_part(self, header: PartHeader) -> Slot | None:
        """Room for a part that is about to be received; none if it is here or answered."""
        core = self._core
        with core.changed:
            self._check_generation(header.learner, header.generation)
            if core.outer is None:
                raise Refusal("unseeded", "version 0 is not committed yet")
            if self._is_answered(header.learner, header.generation, header.seq):
                return None
            found = look_up(core.state, learner=header.learner, generation=header.generation, seq=header.seq, digest="")
            if isinstance(found, Refuse) and found.reason == "contribution_pending":
                raise Refusal(found.reason, found.message)
            # Under the lock: between this look and the reservation nothing may be accepted that the part would replace.
            return core.staging.reserve(header, layout=core.require_layout())

    def finish_part(self, slot: Slot, *, received: bool) -> None:
        """The part was received and verified, or it did not come through."""
        if received:
            self._core.staging.finish(slot)
        else:
            self._core.staging.release(slot)

    def part_state(self, *, learner: str, generation: int, seq: int, rank: int) -> str:
        """`answered`, `held` or `missing`: whether the sender may forget a part, keeps it, or sends it again."""
        with self._core.changed:
            if self._is_answered(learner, generation, seq):
                return "answered"
        held = self._core.staging.holds(learner=learner, generation=generation, seq=seq, rank=rank)
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
                )
                if found is None and data is not None:
                    found = self._offer(contribution, digest, data)
                if isinstance(found, Refuse):
                    raise Refusal(found.reason, found.message)
                if isinstance(found, Answer):
                    return self._answer(contribution, found.answered)
                if data is not None or isinstance(found, Wait):
                    left = until - time.monotonic()
                    if left <= 0 or core.stopping.is_set():
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
            return self.status()

    def weights(self, version: int) -> Floats:
        """Theta of a version; earlier ones while their state is kept."""
        core = self._core
        with core.changed:
            current, outer = core.state.version, core.outer
        if outer is not None and version == current:
            return outer.theta
        earlier = core.store.read_version(version) if 0 <= version < current else None
        if earlier is None:
            raise Refusal(
                "unknown_version",
                f"version {version} is not here; the newest is {current}",
                hint="adopt the newest version",
            )
        return earlier

    def open_model(self, digest: str) -> BinaryIO:
        """A published model's file, while it is kept."""
        return self._core.store.files.model(digest).open("rb")

    def status(self) -> Status:
        """Which round, who is waited for, and until when."""
        core = self._core
        with core.changed:
            state, ledger, current, now = core.state, core.state.ledger, core.state.round, core.clock()
            members = [
                MemberStatus(
                    learner=name,
                    generation=one.generation,
                    state=one.state,
                    lease_age_seconds=round(now - one.heard, 3),
                    step=one.step,
                    pending_samples=one.pending,
                    merged_samples=one.record.merged_samples,
                    discarded_samples=one.record.discarded_samples,
                )
                for name, one in sorted(state.members.items())
            ]
            return Status(
                run=state.rules.run,
                epoch=state.epoch,
                version=ledger.version,
                state="FINAL" if ledger.final else "SERVING" if ledger.version >= 0 else "SEEDING",
                stage=current.stage if current else "",
                round=current.number if current else ledger.version,
                arrived=sorted(current.arrivals) if current else [],
                waiting_for=state.waiting_for,
                until=core.until(),
                members=members,
                samples_total=ledger.samples_total,
                target_samples=state.rules.target_samples,
                model_sha256=ledger.model_sha256,
                theta_sha256=ledger.theta_sha256,
                final=ledger.final,
                seed_from=state.rules.home if ledger.version < 0 else "",
                alarm=core.alarm,
            )

    def _read_layout(self, shapes: dict[str, list[int]], fingerprint: str) -> Layout:
        try:
            layout = Layout.from_shapes(shapes)
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

    def _check_generation(self, learner: str, generation: int) -> None:
        found = look_up(self._core.state, learner=learner, generation=generation, seq=0, digest="")
        if isinstance(found, Answer) and found.answered.kind == "fenced":
            raise Refusal("fenced", found.answered.reason)
        if isinstance(found, Refuse) and found.reason == "unregistered":
            raise Refusal(found.reason, found.message)

    def _is_answered(self, learner: str, generation: int, seq: int) -> bool:
        member = self._core.state.members.get(learner)
        if member is None:
            return False
        known = member.record.answered
        return known is not None and known.generation == generation and known.seq >= seq

    def _offer(self, contribution: Contribution, digest: str, data: Assembled) -> Effect | None:
        core = self._core
        if not core.staging.is_current(contribution.learner, generation=contribution.generation, seq=contribution.seq):
            raise Refusal("superseded", f"a newer contribution of learner {contribution.learner!r} is on its way")
        problem = data.problem
        if contribution.fingerprint != core.require_layout().fingerprint:
            problem = f"it was cut from another layout ({contribution.fingerprint[:12]})"
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
            discarded_samples=contribution.discarded_samples,
            problem=problem,
        )
        effects = core.apply(event)
        return next((one for one in effects if isinstance(one, (Answer, Refuse, Wait))), None)

    def _answer(self, contribution: Contribution, answered: Answered) -> Verdict:
        core = self._core
        if answered.kind != "fenced":
            core.staging.drop(contribution.learner, generation=contribution.generation, seq=contribution.seq)
        ledger = core.state.ledger
        return Verdict(
            kind=answered.kind,
            version=ledger.version,
            samples_total=ledger.samples_total,
            final=ledger.final,
            theta_sha256=ledger.theta_sha256,
            reason=answered.reason,
            round=answered.round,
            round_members=answered.round_members,
        )

    def _describe(self, learner: str) -> Registration:
        core = self._core
        state, ledger = core.state, core.state.ledger
        member = state.members[learner]
        return Registration(
            generation=member.generation,
            epoch=state.epoch,
            version=ledger.version,
            samples_total=ledger.samples_total,
            last_seq=member.record.last_seq,
            cursor=member.record.cursor,
            merged_samples=member.record.merged_samples,
            discarded_samples=member.record.discarded_samples,
            contribution_pending=state.round is not None and learner in state.round.arrivals,
            seed_needed=ledger.version < 0 and learner == state.rules.home,
            final=ledger.final,
            theta_sha256=ledger.theta_sha256,
        )
