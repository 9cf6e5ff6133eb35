"""Rounds and membership as a pure state machine: `step(state, event) -> (state, effects)` (cross-region.md 8.4, 8.5,
8.7).

    OPEN -> SEALED -> MERGED -> DURABLE -> (published) -> OPEN of the next round

Promises: a contribution gets one verdict and keeps it, an accepted one is merged exactly once whatever happens to its
sender, a sealed round never changes. Must not read a clock, a file or a socket. The shell carries out the effects in
order; if `SaveLedger` fails it forgets the new state.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from msgspec.structs import replace as change

from training.sync.events import (
    Announce,
    Answer,
    Committed,
    Contributed,
    Effect,
    Event,
    Heartbeat,
    Leave,
    MergeDone,
    Published,
    Refuse,
    Register,
    Remark,
    SaveLedger,
    Seeded,
    StartMerge,
    Tick,
    Wait,
)
from training.sync.members import DEAD_AFTER_LEASES, MISTAKES, Arrival, Member, Stage, State, open_round
from training.sync.messages import Answered, MemberRecord, VerdictKind

Outcome = tuple[State, tuple[Effect, ...]]
_EMA_SHARE = 0.3
"""Weight of the newest round in the running mean of round times."""


def step(state: State, event: Event) -> Outcome:
    """What one event makes of the state."""
    after, effects = _apply(state, event)
    after, sealed = _seal_if_complete(after)
    effects = (*effects, *sealed)
    if _view(after) != _view(state):
        effects = (*effects, Announce())
    return after, effects


def _view(state: State) -> object:
    if state.round is None:
        return None
    return (
        state.round.number,
        sorted(state.round.arrivals),
        state.waiting_for,
        state.round.deadline,
        state.round.stage == "OPEN",
    )


def _apply(state: State, event: Event) -> Outcome:
    match event:
        case Register():
            return _register(state, event)
        case Heartbeat():
            return _heartbeat(state, event)
        case Leave():
            return _leave(state, event)
        case Seeded():
            return _seed(state, event)
        case Contributed():
            return _contribute(state, event)
        case Tick():
            return _tick(state, event)
        case MergeDone():
            return _advance(state, "SEALED", "MERGED"), ()
        case Committed():
            return _commit(state, event)
        case Published():
            return _publish(state, event)


# --- membership


def _register(state: State, event: Register) -> Outcome:
    if event.learner not in state.rules.learners:
        known = ", ".join(state.rules.learners)
        return state, (
            Refuse(
                reason="unknown_learner",
                message=f"run {state.rules.run} has no learner {event.learner!r}, only {known}",
            ),
        )
    old = state.members.get(event.learner)
    record = old.record if old else MemberRecord(learner=event.learner)
    record = change(record, generation=record.generation + 1, left=False)
    after = state.put(Member(record=record, state="active", heard=event.now))
    return _join(after, event.learner), (SaveLedger(),)


def _join(state: State, learner: str) -> State:
    """Take a learner into the open round: before the first arrival, or in the first round if the plan expects it."""
    current = state.round
    if current is None or current.stage != "OPEN" or learner in current.arrivals:
        return state
    if current.arrivals and learner not in current.expected:
        return state
    others = frozenset(one for one in current.members if one[0] != learner)
    members = others | {(learner, state.members[learner].generation)}
    return replace(state, round=replace(current, members=members))


def _fence(state: State, learner: str, generation: int) -> Refuse | None:
    member = state.members.get(learner)
    if member is None or generation > member.generation:
        return Refuse(
            reason="unregistered",
            message=f"learner {learner!r} has no generation {generation} here; it has to register",
        )
    if generation < member.generation:
        return Refuse(
            reason="fenced",
            message=f"a newer process speaks for learner {learner!r} (generation {member.generation} > {generation})",
        )
    if member.state == "dead":
        return Refuse(
            reason="fenced",
            message=f"learner {learner!r} was silent for {DEAD_AFTER_LEASES} leases; it has to register anew",
        )
    return None


def _heartbeat(state: State, event: Heartbeat) -> Outcome:
    refusal = _fence(state, event.learner, event.generation)
    if refusal:
        return state, (refusal,)
    member = state.members[event.learner]
    back = member.state == "suspect"
    member = replace(
        member,
        heard=event.now,
        step=event.step,
        pending=event.pending,
        step_seconds=event.step_seconds,
        state="active" if back else member.state,
    )
    after = state.put(member)
    if not back:
        return after, ()
    return _join(after, event.learner), (Remark(level="info", text=f"learner {event.learner} is heard again"),)


def _leave(state: State, event: Leave) -> Outcome:
    refusal = _fence(state, event.learner, event.generation)
    if refusal:
        return state, (refusal,)
    member = state.members[event.learner]
    discarded = max(member.record.discarded_samples, event.discarded_samples)
    record = change(member.record, left=True, discarded_samples=discarded)
    return state.put(replace(member, record=record, state="left", heard=event.now)), (SaveLedger(),)


# --- rounds


def _seed(state: State, event: Seeded) -> Outcome:
    if state.version >= 0:
        message = f"version {state.version} is committed; a seed is taken for version 0 only"
        return state, (Refuse(reason="seed_refused", message=message),)
    ledger = change(
        state.ledger,
        version=0,
        seed_sha256=event.seed_sha256,
        theta_sha256=event.theta_sha256,
        fingerprint=event.fingerprint,
        model_sha256=event.model_sha256,
    )
    after = replace(state, ledger=ledger)
    return replace(after, round=open_round(after, now=event.now)), (SaveLedger(),)


def look_up(state: State, *, learner: str, generation: int, seq: int, digest: str) -> Answer | Wait | Refuse | None:
    """What is known of a contribution without its data; none if its data has to be looked at."""
    refusal = _fence(state, learner, generation)
    if refusal and refusal.reason == "fenced":
        return Answer(
            answered=Answered(
                generation=generation, seq=seq, digest=digest, kind="fenced", round=0, reason=refusal.message
            )
        )
    if refusal:
        return refusal
    conflict = Refuse(
        reason="conflict",
        message=f"contribution {seq} of learner {learner!r}, generation {generation}, is here with other content",
    )
    known = state.members[learner].record.answered
    if known and (known.generation, known.seq) == (generation, seq):
        return Answer(answered=known) if known.digest == digest else conflict
    waiting = state.round.arrivals.get(learner) if state.round else None
    if waiting is None:
        return None
    if (waiting.generation, waiting.seq) == (generation, seq):
        return Wait() if waiting.digest == digest else conflict
    message = (
        f"contribution {waiting.seq} of generation {waiting.generation} of learner {learner!r} waits in this round"
    )
    return Refuse(reason="contribution_pending", message=message)


def _contribute(state: State, event: Contributed) -> Outcome:
    known = look_up(state, learner=event.learner, generation=event.generation, seq=event.seq, digest=event.digest)
    if known:
        return state, (known,)
    member, current = state.members[event.learner], state.round
    problem = _find_problem(state, member.record, event)
    if problem:
        return _mistake(state, member, event, problem)
    if state.ledger.final:
        return _record(state, member, _answer(event, "late", reason="the run is final"))
    if current is None or current.stage != "OPEN":
        return state, (Wait(),)
    if event.base_version < state.version:
        reason = f"based on version {event.base_version}, version {state.version} is merged"
        return _record(state, member, _answer(event, "late", reason=reason))
    return _accept(state, event), ()


def _find_problem(state: State, record: MemberRecord, event: Contributed) -> str:
    """Why a contribution can never be merged."""
    if event.problem:
        return event.problem
    if event.base_version > state.version or event.base_version < 0:
        return f"based on version {event.base_version}, but the newest is {state.version}"
    if event.samples < 1:
        return f"it claims {event.samples} samples"
    if event.seq <= record.last_seq:
        return f"sequence {event.seq} is not above the last merged one, {record.last_seq}"
    norms = state.ledger.norms
    if len(norms) >= state.rules.norm_minimum:
        limit = state.rules.norm_factor * statistics.median(norms)
        if event.norm > limit > 0:
            usual = limit / state.rules.norm_factor
            return f"its norm is {event.norm:.3g}, more than {state.rules.norm_factor:g} times the usual {usual:.3g}"
    return ""


def _answer(event: Contributed, kind: VerdictKind, *, reason: str) -> Answered:
    return Answered(generation=event.generation, seq=event.seq, digest=event.digest, kind=kind, round=0, reason=reason)


def _record(state: State, member: Member, answered: Answered, *, invalid_in_row: int | None = None) -> Outcome:
    record = change(member.record, answered=answered)
    if invalid_in_row is not None:
        record = change(record, invalid_in_row=invalid_in_row)
    return state.put(replace(member, record=record)), (Answer(answered=answered),)


def _mistake(state: State, member: Member, event: Contributed, problem: str) -> Outcome:
    in_row = member.record.invalid_in_row + 1
    text = f"contribution {event.seq} of learner {event.learner} is invalid: {problem}"
    if in_row >= MISTAKES:
        member = replace(member, state="quarantined")
        text += f"; that was number {in_row} in a row, the learner is quarantined"
    after, effects = _record(state, member, _answer(event, "invalid", reason=problem), invalid_in_row=in_row)
    return after, (*effects, Remark(level="warning", text=text))


def _accept(state: State, event: Contributed) -> State:
    assert state.round is not None
    arrival = Arrival(
        learner=event.learner,
        generation=event.generation,
        seq=event.seq,
        digest=event.digest,
        samples=event.samples,
        cursor=event.cursor,
        base_version=event.base_version,
        discarded_samples=event.discarded_samples,
        norm=event.norm,
        when=event.now,
    )
    deadline = state.round.deadline if state.round.arrivals else event.now + _patience(state)
    arrivals = {**state.round.arrivals, event.learner: arrival}
    return replace(state, round=replace(state.round, arrivals=arrivals, deadline=deadline))


def _patience(state: State) -> float:
    return max(state.rules.round_deadline, 3 * state.ledger.round_seconds)


def _seal_if_complete(state: State) -> Outcome:
    """All that are waited for have arrived."""
    current = state.round
    if current is None or current.stage != "OPEN" or not current.arrivals or state.waiting_for:
        return state, ()
    return _seal(state)


def _seal(state: State) -> Outcome:
    assert state.round is not None
    sealed = _advance(state, "OPEN", "SEALED")
    return sealed, (StartMerge(round=state.round.number),)


def _tick(state: State, event: Tick) -> Outcome:
    gap = event.now - state.ticked
    members = dict(state.members)
    if gap > state.rules.lease / 2:  # the syncer itself stood still: nobody else is to blame for that time
        members = {name: replace(one, heard=min(one.heard + gap, event.now)) for name, one in members.items()}
    effects: list[Effect] = []
    for name in sorted(members):
        member = members[name]
        age = event.now - member.heard
        if member.state == "active" and age > state.rules.lease:
            member = replace(member, state="suspect")
            effects.append(
                Remark(level="warning", text=f"learner {name} has been silent for {age:.1f} s and is not waited for")
            )
        if member.state == "suspect" and age > DEAD_AFTER_LEASES * state.rules.lease:
            member = replace(member, state="dead")
            effects.append(
                Remark(
                    level="warning",
                    text=f"learner {name} has been silent for {age:.1f} s; generation {member.generation} is fenced",
                )
            )
        members[name] = member
    after = replace(state, members=members, ticked=event.now)
    current = after.round
    if (
        current is None
        or current.stage != "OPEN"
        or current.deadline is None
        or event.now < current.deadline
        or not after.waiting_for
    ):
        return after, tuple(effects)
    if len(current.arrivals) >= after.quorum:
        missing = ", ".join(after.waiting_for)
        effects.append(Remark(level="warning", text=f"round {current.number} closes at its deadline without {missing}"))
        after, sealed = _seal(after)
        return after, (*effects, *sealed)
    share = f"{len(current.arrivals)} of {after.quorum} contributions"
    missing = ", ".join(after.waiting_for)
    text = f"round {current.number} has {share} at its deadline {current.attempt}; it waits for {missing}"
    effects.append(Remark(level="error", text=text))
    longer = replace(current, attempt=current.attempt + 1, deadline=event.now + _patience(after))
    return replace(after, round=longer), tuple(effects)


def _advance(state: State, before: Stage, stage: Stage) -> State:
    assert state.round is not None
    assert state.round.stage == before, f"round {state.round.number} is {state.round.stage}, not {before}"
    return replace(state, round=replace(state.round, stage=stage))


def _commit(state: State, event: Committed) -> Outcome:
    """Book the merge: weights, ledger and verdicts become durable together."""
    after = _advance(state, "MERGED", "DURABLE")
    assert after.round is not None
    current, ledger = after.round, state.ledger
    names = sorted(current.arrivals)
    for name in names:
        arrival, member = current.arrivals[name], after.members[name]
        answered = Answered(
            generation=arrival.generation,
            seq=arrival.seq,
            digest=arrival.digest,
            kind="merged",
            round=current.number,
            round_members=names,
        )
        record = change(
            member.record,
            merged_samples=member.record.merged_samples + arrival.samples,
            discarded_samples=max(member.record.discarded_samples, arrival.discarded_samples),
            last_seq=arrival.seq,
            cursor=arrival.cursor,
            answered=answered,
            invalid_in_row=0,
        )
        after = after.put(replace(member, record=record))
    total = ledger.samples_total + sum(one.samples for one in current.arrivals.values())
    seconds = max(0.0, event.now - current.opened)
    mean = seconds if ledger.round_seconds == 0 else (1 - _EMA_SHARE) * ledger.round_seconds + _EMA_SHARE * seconds
    norms = [*ledger.norms, *(current.arrivals[name].norm for name in names)][-state.rules.norm_history :]
    ledger = change(
        ledger,
        version=current.number,
        samples_total=total,
        final=total >= state.rules.target_samples,
        round_seconds=mean,
        norms=norms,
        theta_sha256=event.theta_sha256,
        model_sha256=event.model_sha256,
    )
    return replace(after, ledger=ledger), (SaveLedger(),)


def _publish(state: State, event: Published) -> Outcome:
    assert state.round is not None
    assert state.round.stage == "DURABLE"
    if state.ledger.final:
        return replace(state, round=None), (Remark(level="info", text=f"version {state.version} is final"),)
    return replace(state, round=open_round(state, now=event.now)), ()
