"""Rounds and membership as a pure state machine: `step(state, event) -> (state, effects)` (cross-region.md 8.4, 8.5,
8.7). Each fragment of the model has rounds of its own:

    OPEN -> SEALED -> MERGED -> DURABLE -> (published) -> OPEN of the next round

Barrier: a round waits for everybody who was active when it opened, at its deadline for a quorum. Decoupled: a window
opens with the first arrival and closes when a quorum is there and the grace is over; a run that reaches its target
drains: what is in flight is merged, then every learner's last contribution, then the run is final.

Promises: a contribution gets one verdict and keeps it, an accepted one is merged exactly once whatever happens to its
sender, a sealed round never changes. Must not read a clock, a file or a socket. The shell carries out the effects in
order; if `SaveLedger` fails it forgets the new state.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as change

from training.sync import offers
from training.sync.events import (
    Announce,
    Committed,
    Contributed,
    Drained,
    Effect,
    Event,
    Finish,
    Finished,
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
)
from training.sync.members import (
    DEAD_AFTER_LEASES,
    MISTAKES,
    OPENINGS,
    Member,
    Round,
    Stage,
    State,
    longest_patience,
    new_member,
    open_all,
    open_round,
    patience,
    put_place,
)
from training.sync.messages import Answered, FragmentRecord, PlaceRecord
from training.sync.offers import Outcome, find_fence, look_up

__all__ = ["look_up", "step"]
_EMA_SHARE = 0.3
"""Weight of the newest value in running means of seconds."""


def step(state: State, event: Event) -> Outcome:
    """What one event makes of the state."""
    state = _forgive_pause(state, now=event.now)
    after, effects = _apply(state, event)
    for fragment in range(len(after.rounds)):
        after, closed = _close_if_due(after, fragment, now=event.now)
        effects = (*effects, *closed)
    after, finish = _finish_if_drained(after, now=event.now)
    changed = [one for one in range(state.rules.fragments) if _view(after, one) != _view(state, one)]
    return after, (*effects, *finish, *(Announce(fragment=one) for one in changed))


def _view(state: State, fragment: int) -> object:
    current = state.round(fragment)
    if current is None:
        return None
    waiting = state.waiting_for(fragment)
    return current.number, sorted(current.arrivals), waiting, current.deadline, current.stage == "OPEN"


def _apply(state: State, event: Event) -> Outcome:
    match event:
        case Register():
            return _register(state, event)
        case Heartbeat():
            return _heartbeat(state, event)
        case Leave():
            return _leave(state, event)
        case Drained():
            return _drained(state, event)
        case Seeded():
            return _seed(state, event)
        case Contributed():
            return offers.contribute(state, event)
        case Tick():
            return _tick(state, event)
        case MergeDone():
            return _advance(state, event.fragment, "SEALED", "MERGED"), ()
        case Committed():
            return _commit(state, event)
        case Published():
            return _publish(state, event)
        case Finished():
            return _finish(state, event)


# --- membership


def _register(state: State, event: Register) -> Outcome:
    if event.learner not in state.rules.learners:
        known = ", ".join(state.rules.learners)
        message = f"run {state.rules.run} has no learner {event.learner!r}, only {known}"
        return state, (Refuse(reason="unknown_learner", message=message),)
    old = state.members.get(event.learner)
    record = old.record if old else new_member(event.learner, fragments=state.rules.fragments)
    # Taken again after a quarantine, on probation: one more mistake, and it is there again.
    mistakes = min(record.invalid_in_row, MISTAKES - 1)
    record = change(record, generation=record.generation + 1, left=False, drained=[], invalid_in_row=mistakes)
    # What an earlier process had trained counts until this one says what it has taken up.
    after = state.put(Member(record=record, state="active", heard=event.now, kept=old.kept if old else 0))
    return _join(after, event.learner), (SaveLedger(),)


def _join(state: State, learner: str) -> State:
    """Take a learner into open rounds: before the first arrival, or in the first round if the plan expects it."""
    for current in state.rounds:
        if current.stage != "OPEN" or learner in current.arrivals:
            continue
        if current.arrivals and learner not in current.expected:
            continue
        others = frozenset(one for one in current.members if one[0] != learner)
        members = others | {(learner, state.members[learner].generation)}
        state = state.put_round(replace(current, members=members))
    return state


def _heartbeat(state: State, event: Heartbeat) -> Outcome:
    refusal = find_fence(state, event.learner, event.generation)
    if refusal:
        return state, (refusal,)
    member = state.members[event.learner]
    back = member.state == "suspect"
    member = replace(
        member,
        heard=event.now,
        step=event.step,
        pending=event.pending,
        kept=member.kept if event.kept is None else event.kept,
        step_seconds=event.step_seconds,
        in_flight_steps=event.in_flight_steps,
        blocked_seconds=event.blocked_seconds,
        measures=event.measures,
        state="active" if back else member.state,
    )
    after = state.put(member)
    if not back:
        return after, ()
    return _join(after, event.learner), (Remark(level="info", text=f"learner {event.learner} is heard again"),)


def _leave(state: State, event: Leave) -> Outcome:
    refusal = find_fence(state, event.learner, event.generation)
    if refusal:
        return state, (refusal,)
    member = state.members[event.learner]
    places = [
        change(place, discarded_samples=max(place.discarded_samples, _of_fragment(event.discarded, fragment)))
        for fragment, place in enumerate(member.record.places)
    ]
    record = change(member.record, left=True, places=places)
    return state.put(replace(member, record=record, state="left", heard=event.now)), (SaveLedger(),)


def _of_fragment(counts: tuple[int, ...], fragment: int) -> int:
    """One number counts for all fragments."""
    return counts[min(fragment, len(counts) - 1)] if counts else 0


def _drained(state: State, event: Drained) -> Outcome:
    refusal = find_fence(state, event.learner, event.generation)
    if refusal:
        return state, (refusal,)
    if not state.ledger.draining:
        message = f"run {state.rules.run} is not draining: learner {event.learner!r} has to go on"
        return state, (Refuse(reason="not_draining", message=message),)
    member = state.members[event.learner]
    record = change(member.record, drained=list(range(state.rules.fragments)))
    return state.put(replace(member, record=record, heard=event.now)), (SaveLedger(),)


def _forgive_pause(state: State, *, now: float) -> State:
    """Nothing happened for long, not even a tick: the syncer itself stood still, and nobody else is to blame for that
    time. Leases and deadlines run as if it had not been.
    """
    gap = now - state.ticked
    if gap <= state.rules.lease / 2:
        return replace(state, ticked=max(now, state.ticked))
    members = {name: replace(one, heard=min(one.heard + gap, now)) for name, one in state.members.items()}
    rounds = tuple(
        one if one.deadline is None else replace(one, deadline=one.deadline + gap) for one in state.rounds
    )  # fmt: skip
    drain_until = None if state.drain_until is None else state.drain_until + gap
    return replace(state, members=members, rounds=rounds, drain_until=drain_until, ticked=now)


def _tick(state: State, event: Tick) -> Outcome:
    members, effects = dict(state.members), list[Effect]()
    for name in sorted(members):
        member = members[name]
        age = event.now - member.heard
        if member.state == "active" and age > state.rules.lease:
            member = replace(member, state="suspect")
            text = f"learner {name} has been silent for {age:.1f} s and is not waited for"
            effects.append(Remark(level="warning", text=text))
        if member.state == "suspect" and age > DEAD_AFTER_LEASES * state.rules.lease:
            member = replace(member, state="dead")
            text = f"learner {name} has been silent for {age:.1f} s; generation {member.generation} is fenced"
            effects.append(Remark(level="warning", text=text))
        members[name] = member
    return replace(state, members=members), tuple(effects)


# --- rounds


def _seed(state: State, event: Seeded) -> Outcome:
    if state.version >= 0:
        message = f"version {state.version} is committed; a seed is taken for version 0 only"
        return state, (Refuse(reason="seed_refused", message=message),)
    ledger = change(
        state.ledger,
        fragments=[FragmentRecord(version=0, theta_sha256=one) for one in event.theta_sha256],
        seed_sha256=event.seed_sha256,
        fingerprint=event.fingerprint,
        model_sha256=event.model_sha256,
    )
    return open_all(replace(state, ledger=ledger), now=event.now), (SaveLedger(),)


def _close_if_due(state: State, fragment: int, *, now: float) -> Outcome:
    """Seal a round when all that are waited for have arrived, or its deadline has passed with a quorum."""
    current = state.rounds[fragment]
    if current.stage != "OPEN" or not current.arrivals:
        return state, ()
    waiting = state.waiting_for(fragment)
    if not waiting:
        return _seal(state, current, now=now)
    if current.deadline is None or now < current.deadline:
        return state, ()
    missing = ", ".join(waiting)
    # A decoupled window never waits for ever: those who could fill it may be waiting for another one.
    if state.rules.decoupled or len(current.arrivals) >= state.quorum:
        after, sealed = _seal(state, current, now=now)
        if current.quorum_at is not None:
            return after, sealed
        text = f"{_name(state, current)} closes at its deadline without {missing}"
        return after, (Remark(level="warning", text=text), *sealed)
    share = f"{len(current.arrivals)} of {state.quorum} contributions"
    text = f"{_name(state, current)} has {share} at its deadline {current.attempt}; it waits for {missing}"
    longer = replace(current, attempt=current.attempt + 1, deadline=now + patience(state, fragment))
    return state.put_round(longer), (Remark(level="error", text=text),)


def _name(state: State, current: Round) -> str:
    part = f" of fragment {current.fragment}" if state.rules.fragments > 1 else ""
    return f"round {current.number}{part}"


def _seal(state: State, current: Round, *, now: float) -> Outcome:
    sealed = replace(current, stage="SEALED", sealed=now, active=len(state.active))
    return state.put_round(sealed), (StartMerge(fragment=current.fragment, round=current.number),)


def _advance(state: State, fragment: int, before: Stage, stage: Stage) -> State:
    current = state.rounds[fragment]
    assert current.stage == before, f"round {current.number} is {current.stage}, not {before}"
    return state.put_round(replace(current, stage=stage))


def _commit(state: State, event: Committed) -> Outcome:
    """Book the merge: weights, ledger and verdicts become durable together."""
    after = _advance(state, event.fragment, "MERGED", "DURABLE")
    current, ledger = after.rounds[event.fragment], state.ledger
    for name in sorted(current.arrivals):
        after = after.put(_book(after.members[name], current))
    record = _note(ledger.fragments[event.fragment], current, event, history=state.rules.norm_history)
    after = after.put_fragment(event.fragment, record)
    reached = after.ledger.samples_total >= state.rules.target_samples
    # A round that is sealed already is merged first: its learners would lose it.
    others = any(one.stage != "OPEN" for one in state.rounds if one.fragment != event.fragment)
    ledger = change(
        after.ledger,
        model_sha256=event.model_sha256 or ledger.model_sha256,
        draining=ledger.draining or (reached and state.rules.decoupled),
        final=reached and not state.rules.decoupled and not others,
    )
    after = replace(after, ledger=ledger)
    if ledger.draining and state.drain_until is None:
        after = replace(after, drain_until=event.now + longest_patience(after))
    return after, (SaveLedger(),)


def _book(member: Member, current: Round) -> Member:
    """A learner whose contribution is merged."""
    arrival, place = current.arrivals[member.learner], member.record.places[current.fragment]
    answered = Answered(
        generation=arrival.generation,
        seq=arrival.seq,
        digest=arrival.digest,
        kind="merged",
        round=current.number,
        round_members=sorted(current.arrivals),
        staleness=current.staleness(member.learner),
    )
    place = PlaceRecord(
        merged_samples=place.merged_samples + arrival.samples,
        discarded_samples=max(place.discarded_samples, arrival.discarded_samples),
        last_seq=arrival.seq,
        cursor=arrival.cursor,
        answered=answered,
        base_version=arrival.base_version,
    )
    record = change(put_place(member.record, current.fragment, place), invalid_in_row=0)
    if arrival.last and arrival.generation == record.generation:
        record = change(record, drained=sorted({*record.drained, current.fragment}))
    return replace(member, record=record)


def _note(record: FragmentRecord, current: Round, event: Committed, *, history: int) -> FragmentRecord:
    """The fragment after the merge."""
    names = sorted(current.arrivals)
    record = change(
        record,
        version=current.number,
        samples_total=record.samples_total + sum(one.samples for one in current.arrivals.values()),
        # Not what was waited in vain: each deadline would make the next one longer, while one learner hangs.
        round_seconds=_mean(record.round_seconds, event.now - current.opened - current.waited_in_vain),
        norms=[*record.norms, *(current.arrivals[name].norm for name in names)][-history:],
        theta_sha256=event.theta_sha256,
    )
    if current.quorum_at is None or current.first_arrival is None:
        return record
    return change(record, quorum_seconds=_mean(record.quorum_seconds, current.quorum_at - current.first_arrival))


def _mean(before: float, seconds: float) -> float:
    seconds = max(0.0, seconds)
    return seconds if before == 0 else (1 - _EMA_SHARE) * before + _EMA_SHARE * seconds


def _publish(state: State, event: Published) -> Outcome:
    current = state.rounds[event.fragment]
    assert current.stage == "DURABLE"
    if state.ledger.final:
        return replace(state, rounds=()), (Remark(level="info", text=f"version {state.version} is final"),)
    record = state.ledger.fragments[event.fragment]
    taken = event.now - (event.now if current.sealed is None else current.sealed)
    after = state.put_fragment(event.fragment, change(record, sync_seconds=_mean(record.sync_seconds, taken)))
    openings = (*current.openings, current.opened)[-OPENINGS:]
    return after.put_round(replace(open_round(after, event.fragment, now=event.now), openings=openings)), ()


# --- the end of a decoupled run


def _finish_if_drained(state: State, *, now: float) -> Outcome:
    """Nobody who is waited for has anything left to send, or the longest wait is over."""
    if not state.ledger.draining or state.ledger.final or state.finishing:
        return state, ()
    if any(one.stage != "OPEN" or one.arrivals for one in state.rounds):
        return state, ()
    everything = list(range(state.rules.fragments))
    open_ends = [one.learner for one in state.active if one.record.drained != everything]
    gone = all(one.state == "left" for one in state.members.values())
    late = state.drain_until is not None and now >= state.drain_until
    if (state.active or gone) and not open_ends:
        return replace(state, finishing=True), (Finish(),)
    if not late:
        return state, ()
    missing = ", ".join(open_ends) or "anybody"
    remark = Remark(level="warning", text=f"the run ends at its deadline without the last contribution of {missing}")
    return replace(state, finishing=True), (remark, Finish())


def _finish(state: State, event: Finished) -> Outcome:
    assert state.finishing
    ledger = change(state.ledger, final=True, model_sha256=event.model_sha256)
    after = replace(state, ledger=ledger, rounds=(), finishing=False)
    return after, (SaveLedger(), Remark(level="info", text=f"version {state.version} is final"))
