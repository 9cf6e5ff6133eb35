"""What becomes of one contribution: refused, answered, or accepted into the open round of its fragment. The part of
`training.sync.machine` that learners meet.

Promises that what was answered is durable before it is said, and never answered otherwise: a verdict that only memory
knew could change after a restart, when its sender has already thrown the samples away.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as change

from training.sync.events import Answer, Contributed, Effect, Refuse, Remark, SaveLedger, Wait
from training.sync.members import (
    DEAD_AFTER_LEASES,
    MISTAKES,
    MOST_STALENESS,
    Arrival,
    Member,
    Round,
    State,
    grace,
    patience,
    put_place,
)
from training.sync.messages import Answered, PlaceRecord, VerdictKind

Outcome = tuple[State, tuple[Effect, ...]]


def find_fence(state: State, learner: str, generation: int) -> Refuse | None:
    """Why nobody may speak for a learner under this generation; none if it may."""
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


def look_up(
    state: State, *, learner: str, generation: int, seq: int, digest: str, fragment: int = 0
) -> Answer | Wait | Refuse | None:
    """What is known of a contribution without its data; none if its data has to be looked at."""
    if not 0 <= fragment < state.rules.fragments:
        return Refuse(reason="bad_request", message=f"there is no fragment {fragment} of {state.rules.fragments}")
    refusal = find_fence(state, learner, generation)
    if refusal and refusal.reason == "fenced":
        return Answer(
            answered=Answered(
                generation=generation, seq=seq, digest=digest, kind="fenced", round=0, reason=refusal.message
            )
        )
    if refusal:
        return refusal
    name = f"contribution {seq} of learner {learner!r}, generation {generation}"
    conflict = Refuse(reason="conflict", message=f"{name}, is here with other content")
    known = state.members[learner].record.places[fragment].answered
    if known and (known.generation, known.seq) == (generation, seq):
        return Answer(answered=known) if known.digest == digest else conflict
    if known and known.generation == generation and seq < known.seq:
        return Refuse(reason="replayed", message=f"{name}, was answered long ago; the last one was {known.seq}")
    current = state.round(fragment)
    waiting = current.arrivals.get(learner) if current else None
    if waiting is None:
        return None
    if (waiting.generation, waiting.seq) == (generation, seq):
        return Wait() if waiting.digest == digest else conflict
    message = (
        f"contribution {waiting.seq} of generation {waiting.generation} of learner {learner!r} waits in this round"
    )
    return Refuse(reason="contribution_pending", message=message)


def contribute(state: State, event: Contributed) -> Outcome:
    """Answer a contribution, or take it into the open round."""
    known = look_up(
        state,
        learner=event.learner,
        generation=event.generation,
        seq=event.seq,
        digest=event.digest,
        fragment=event.fragment,
    )
    if known:
        return state, (known,)
    member, current = state.members[event.learner], state.round(event.fragment)
    problem = _find_problem(state, member, event)
    if problem:
        return _mistake(state, member, event, problem)
    if state.ledger.final:
        return _record(state, member, event, "late", reason="the run is final")
    if current is None or current.stage != "OPEN" or _closes(state, now=event.now):
        return state, (Wait(),)
    late = _find_lateness(state, event)
    if late:
        return _record(_learn(state, current, event), member, event, "late", reason=late)
    return _accept(state, current, event), ()


def _closes(state: State, *, now: float) -> bool:
    """The end of a run that drains has come: what is sent now waits to hear that the run is final."""
    return state.finishing or (state.drain_until is not None and now >= state.drain_until)


def _find_problem(state: State, member: Member, event: Contributed) -> str:
    """Why a contribution can never be merged."""
    record, place = state.ledger.fragments[event.fragment], member.record.places[event.fragment]
    if member.state == "quarantined":
        return "the learner is quarantined; it has to register anew"
    if event.problem:
        return event.problem
    if event.base_version > record.version or event.base_version < 0:
        return f"based on version {event.base_version}, but the newest is {record.version}"
    if event.samples < 1:
        return f"it claims {event.samples} samples"
    if event.seq <= place.last_seq:
        return f"sequence {event.seq} is not above the last merged one, {place.last_seq}"
    if event.last and not state.ledger.draining:
        return "it says that it is the last one, but the run goes on"
    if event.fragment in member.record.drained and not state.ledger.final:
        return "it comes after the last one"
    if len(record.norms) >= state.rules.norm_minimum:
        # Not the median, which the reference advises: while the learning rate warms up displacements grow by more than
        # ten times within a few rounds, and honest ones were refused.
        most = max(record.norms[-state.rules.norm_minimum :])
        if event.norm > state.rules.norm_factor * most > 0:
            times = f"{state.rules.norm_factor:g} times the most of late, {most:.3g}"
            return f"its norm is {event.norm:.3g}, more than {times}"
    return ""


def _find_lateness(state: State, event: Contributed) -> str:
    """Why a contribution is not merged though nothing is wrong with it: its learner carries it on."""
    version = state.ledger.fragments[event.fragment].version
    behind = version - event.base_version
    most = MOST_STALENESS * max(1, len(state.active)) if state.rules.decoupled else 0
    if behind <= most:
        return ""
    limit = f"; at most {most} may be between" if most else ""
    return f"based on version {event.base_version}, version {version} is merged{limit}"


def _learn(state: State, current: Round, event: Contributed) -> State:
    """A barrier's rounds wait the longer for a learner that is slow: one that hangs teaches them nothing."""
    missed = current.openings[-(current.number - 1 - event.base_version) :]
    if state.rules.decoupled or not missed:
        return state
    record = state.ledger.fragments[event.fragment]
    needed = max(record.round_seconds, event.now - missed[0])
    return state.put_fragment(event.fragment, change(record, round_seconds=needed))


def _record(state: State, member: Member, event: Contributed, kind: VerdictKind, *, reason: str) -> Outcome:
    """A verdict without a merge."""
    answered = Answered(
        generation=event.generation, seq=event.seq, digest=event.digest, kind=kind, round=0, reason=reason
    )
    place: PlaceRecord = member.record.places[event.fragment]
    place = change(place, answered=answered)
    record = put_place(member.record, event.fragment, place)
    return state.put(replace(member, record=record)), (SaveLedger(), Answer(answered=answered))


def _mistake(state: State, member: Member, event: Contributed, problem: str) -> Outcome:
    in_row = member.record.invalid_in_row + 1
    text = f"contribution {event.seq} of learner {event.learner} is invalid: {problem}"
    if in_row >= MISTAKES and member.state != "quarantined":
        member = replace(member, state="quarantined")
        text += f"; that was number {in_row} in a row, the learner is quarantined"
    member = replace(member, record=change(member.record, invalid_in_row=in_row))
    after, effects = _record(state, member, event, "invalid", reason=problem)
    return after, (*effects, Remark(level="warning", text=text))


def _accept(state: State, current: Round, event: Contributed) -> State:
    arrival = Arrival(
        learner=event.learner,
        generation=event.generation,
        seq=event.seq,
        digest=event.digest,
        steps=event.steps,
        samples=event.samples,
        cursor=event.cursor,
        base_version=event.base_version,
        discarded_samples=event.discarded_samples,
        norm=event.norm,
        last=event.last,
        when=event.now,
        loss=event.loss,
    )
    after = replace(current, arrivals={**current.arrivals, event.learner: arrival})
    if after.deadline is None:
        after = replace(after, deadline=event.now + patience(state, event.fragment))
    quorum = state.rules.decoupled and len(after.arrivals) >= state.quorum and not after.only_last
    if quorum and after.quorum_at is None:
        after = replace(after, quorum_at=event.now, deadline=event.now + grace(state, event.fragment))
    return state.put_round(after)
