"""The supervisor's decisions as one pure function: `step(state, input) -> (state, effects)`.

Promises: a restart only for a classified cause and within its budget; a person's error ends the run at once; drivers
stop before the syncer; no state without a deadline. Must not read a clock, a file or a process.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from gkr.local.states import (
    SYNCER,
    Begin,
    Broken,
    CancelAsked,
    Effect,
    Emit,
    Exited,
    Fate,
    Finish,
    Heard,
    Input,
    Kill,
    Limits,
    PendingRecovery,
    Process,
    Serving,
    StartDriver,
    StartSyncer,
    State,
    Terminate,
    Tick,
)
from spec.errors import (
    EXIT_CANCELLED,
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PREFLIGHT,
    EXIT_REFUSED,
    EXIT_UNFINISHED,
    EXIT_UNREACHABLE,
)
from spec.events import AttemptStarted, Note, Recovery, Restored, RunStatus, StepMetrics, SyncMerged

Step = tuple[State, tuple[Effect, ...]]

_SOURCE = "supervisor"
_KEPT_CODES = {EXIT_CONFIG, EXIT_UNREACHABLE, EXIT_PREFLIGHT, EXIT_REFUSED, EXIT_FAILED}
_RETRIED_CODES = {EXIT_UNREACHABLE: "could not reach its peers", EXIT_UNFINISHED: "stopped before the end"}


@dataclass(frozen=True)
class Cause:
    """Why a process ended, and whether trying again can help."""

    text: str
    retry: bool
    exit_code: int


def classify(code: int) -> Cause:
    """The cause behind an exit status; unknown codes are never retried."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Cause(name, retry=True, exit_code=EXIT_FAILED)
    if code in _RETRIED_CODES:
        return Cause(_RETRIED_CODES[code], retry=True, exit_code=code if code in _KEPT_CODES else EXIT_FAILED)
    return Cause(f"exit code {code}", retry=False, exit_code=code if code in _KEPT_CODES else EXIT_FAILED)


def initial(
    learners: list[str], *, with_syncer: bool, batch: int, limits: Limits, attempts: Mapping[str, int] | None = None
) -> State:
    """The state before anything runs; `attempts` are those a former supervisor of the run has used."""
    names = [*learners, SYNCER] if with_syncer else learners
    used = attempts or {}
    return State(processes={name: Process(attempt=used.get(name, 0)) for name in names}, batch=batch, limits=limits)


def step(state: State, heard: Input) -> Step:
    """One decision."""
    if state.status == "ended":
        return state, ()
    match heard:
        case Begin(now):
            return _begin(state, now)
        case Serving():
            return _serving(state, heard)
        case Exited():
            return _exited(state, heard)
        case Heard():
            return _heard(state, heard)
        case CancelAsked(now, hard):
            return _cancel(state, now, hard=hard)
        case Broken(now, reason):
            return _stop(state, now, Fate("failed", reason, EXIT_FAILED))
        case Tick(now):
            return _tick(state, now)
        case _:
            assert_never(heard)


def _begin(state: State, now: float) -> Step:
    emitted = Emit(RunStatus(time=0.0, source=_SOURCE, status="preparing"))
    state = replace(state, status="preparing", run_deadline=now + state.limits.run_seconds)
    if state.syncer is None:
        state, effects = _start_drivers(state, now)
    else:
        state, effects = _start(state, SYNCER, now)
    return state, (emitted, *effects)


def _start_drivers(state: State, now: float) -> Step:
    effects: list[Effect] = []
    for name in state.drivers:
        state, started = _start(state, name, now)
        effects += started
    return state, tuple(effects)


def _start(state: State, name: str, now: float) -> Step:
    process = state.processes[name]
    process = replace(
        process, attempt=process.attempt + 1, running=True, start_at=None, killed_for="", heard_at=now, last_error=""
    )
    if name == SYNCER:
        process = replace(process, serve_deadline=now + state.limits.serve_seconds)
        return _put(state, name, process), (StartSyncer(process.attempt, state.endpoints),)
    return _put(state, name, process), (StartDriver(name, process.attempt, state.endpoints),)


def _serving(state: State, heard: Serving) -> Step:
    syncer = state.syncer
    if syncer is None or state.status == "stopping" or syncer.serve_deadline is None:
        return state, ()
    first, moved = state.endpoints is None, state.endpoints not in (None, heard.endpoints)
    if moved:
        reason = f"the syncer came back at {heard.endpoints.control}, its learners know {state.endpoints}"
        return _stop(state, heard.now, Fate("failed", reason, EXIT_FAILED))
    pending, syncer = syncer.pending, replace(syncer, serve_deadline=None, pending=None)
    state = replace(_put(state, SYNCER, syncer), endpoints=heard.endpoints)
    effects = (_recovered(SYNCER, pending, lost_steps=0, first_step=None),) if pending else ()
    if not first:
        return state, effects
    state, started = _start_drivers(state, heard.now)
    return state, (*effects, *started)


def _exited(state: State, heard: Exited) -> Step:
    process = state.processes[heard.name]
    state = _put(state, heard.name, replace(process, running=False, serve_deadline=None))
    if state.status == "stopping":
        return _advance_stop(state, heard.now)
    if heard.code == EXIT_OK:
        return _ended_well(state, heard)
    if heard.code == EXIT_CANCELLED:
        reason = f"{_title(heard.name)} was asked to stop from outside"
        return _stop(state, heard.now, Fate("cancelled", reason, EXIT_CANCELLED))
    cause = classify(heard.code)
    if process.killed_for:
        cause = replace(cause, text=process.killed_for, retry=True)
    if cause.retry and process.failures < state.limits.restarts:
        return _schedule(state, heard, cause)
    said = process.last_error or heard.last_line
    tries = f" after {process.failures} restarts without progress" if cause.retry else ""
    reason = f"{_title(heard.name)} ended with {cause.text}{tries}" + (f": {said}" if said else "")
    return _stop(state, heard.now, Fate("failed", reason, cause.exit_code))


def _ended_well(state: State, heard: Exited) -> Step:
    process = replace(state.processes[heard.name], finished=True)
    state, pending = _put(state, heard.name, replace(process, pending=None)), process.pending
    effects = (_recovered(heard.name, pending, lost_steps=0, first_step=None),) if pending else ()
    if not all(driver.finished for driver in state.drivers.values()):
        return state, effects
    state, stopped = _stop(state, heard.now, Fate("succeeded", "", EXIT_OK))
    return state, (*effects, *stopped)


def _schedule(state: State, heard: Exited, cause: Cause) -> Step:
    process = state.processes[heard.name]
    delay = 0.0 if process.failures == 0 else state.limits.backoff_seconds * 2 ** (process.failures - 1)
    pending = PendingRecovery(
        cause=cause.text,
        action=f"started again as attempt {process.attempt + 1}",
        died_at=heard.now - heard.detected_seconds,
        detected_seconds=heard.detected_seconds,
        after_attempt=process.spawned,
    )
    # A death during recovery closes the earlier one: each death has its own record.
    closed = (_recovered(heard.name, process.pending, lost_steps=0, first_step=None),) if process.pending else ()
    process = replace(process, failures=process.failures + 1, start_at=heard.now + delay, pending=pending)
    # Its next attempt speaks only once it is up, and the recovery is told when it steps: until then this says it.
    when = f" in {delay:g} s" if delay else ""
    text = f"{_title(heard.name)} ended with {cause.text}; it is {pending.action}{when}"
    said = Emit(Note(time=0.0, source=_SOURCE, level="warning", text=text))
    state, effects = _due(_put(state, heard.name, process), heard.now)
    return state, (*closed, said, *effects)


def _due(state: State, now: float) -> Step:
    effects: list[Effect] = []
    for name, process in state.processes.items():
        if process.start_at is not None and process.start_at <= now:
            state, started = _start(state, name, now)
            effects += started
    return state, tuple(effects)


def _heard(state: State, heard: Heard) -> Step:
    event, now = heard.event, heard.now
    if isinstance(event, SyncMerged):
        return _progress(state, SYNCER, event.round), ()
    if isinstance(event, Note):
        name = event.source.removeprefix("driver/")
        name = SYNCER if name == "syncer" else name
        if event.level == "error" and name in state.processes:
            state = _put(state, name, replace(state.processes[name], last_error=event.text))
        return state, ()
    learner = getattr(event, "learner", "")
    if learner not in state.drivers:
        return state, ()
    state = _put(state, learner, replace(state.processes[learner], heard_at=now))
    if isinstance(event, AttemptStarted):
        return _attempt_started(state, event)
    if isinstance(event, Restored):
        return _restored(state, event), ()
    if isinstance(event, StepMetrics):
        return _stepped(_progress(state, learner, event.step), event, now)
    return state, ()


def _progress(state: State, name: str, reached: int) -> State:
    process = state.processes.get(name)
    if process is None or reached <= process.best:
        return state
    return _put(state, name, replace(process, best=reached, failures=0))


def _attempt_started(state: State, event: AttemptStarted) -> Step:
    # Drivers restart ranks on their own and count attempts as they do; the next one of ours must lie above.
    process = state.processes[event.learner]
    state = _put(
        state, event.learner, replace(process, attempt=max(process.attempt, event.attempt), spawned=event.attempt)
    )
    if state.status != "preparing":
        return state, ()
    return replace(state, status="running"), (Emit(RunStatus(time=0.0, source=_SOURCE, status="running")),)


def _restored(state: State, event: Restored) -> State:
    process = state.processes[event.learner]
    if process.pending is None:
        return state
    pending = replace(process.pending, lost_samples=event.samples_lost)
    return _put(state, event.learner, replace(process, pending=pending))


def _stepped(state: State, event: StepMetrics, now: float) -> Step:
    process = state.processes[event.learner]
    pending = process.pending
    if pending is None or event.attempt <= pending.after_attempt:
        return state, ()
    state = _put(state, event.learner, replace(process, pending=None))
    lost = pending.lost_samples // state.batch
    return state, (_recovered(event.learner, pending, lost_steps=lost, first_step=now - pending.died_at),)


def _recovered(name: str, pending: PendingRecovery, *, lost_steps: int, first_step: float | None) -> Emit:
    return Emit(
        Recovery(
            time=0.0,
            source=_SOURCE,
            learner=name,
            what="syncer" if name == SYNCER else "driver",
            cause=pending.cause,
            action=pending.action,
            detected_seconds=round(pending.detected_seconds, 3),
            first_step_seconds=None if first_step is None else round(first_step, 3),
            lost_steps=lost_steps,
        )
    )


def _cancel(state: State, now: float, *, hard: bool) -> Step:
    effects: tuple[Effect, ...] = ()
    if state.status != "stopping":
        state, effects = _stop(state, now, Fate("cancelled", "cancelled on request", EXIT_CANCELLED))
    if not hard or state.killing or state.status == "ended":
        return state, effects
    state, kills = _killing(state, now)
    return state, (*effects, *kills)


def _stop(state: State, now: float, fate: Fate) -> Step:
    if state.status == "stopping":
        return state, ()  # the first fate counts
    closed: list[Effect] = []
    for name, process in state.processes.items():
        if process.pending is not None:
            closed.append(_recovered(name, process.pending, lost_steps=0, first_step=None))
        state = _put(state, name, replace(process, pending=None, start_at=None))
    state = replace(state, status="stopping", fate=fate, stop_deadline=None)
    state, effects = _advance_stop(state, now)
    return state, (*closed, *effects)


def _advance_stop(state: State, now: float) -> Step:
    """Drivers first: a syncer that goes before them would turn a clean end into connection errors in their logs."""
    running = [name for name, process in state.processes.items() if process.running]
    if not running:
        assert state.fate is not None
        return replace(state, status="ended"), (Finish(state.fate),)
    turn = [name for name in running if name != SYNCER] or running
    untold = [name for name in turn if not state.processes[name].told]
    if not untold:
        return state, ()
    for name in untold:
        state = _put(state, name, replace(state.processes[name], told=True))
    state = replace(state, stop_deadline=now + state.limits.grace_seconds, killing=False)
    return state, tuple(Terminate(name) for name in untold)


def _killing(state: State, now: float) -> Step:
    return replace(state, killing=True, stop_deadline=now + state.limits.kill_seconds), _kill_all(state)


def _kill_all(state: State) -> tuple[Effect, ...]:
    return tuple(Kill(name) for name, process in state.processes.items() if process.running)


def _tick(state: State, now: float) -> Step:
    if state.status == "stopping":
        return _tick_stopping(state, now)
    if state.run_deadline is not None and now > state.run_deadline:
        return _stop(
            state, now, Fate("failed", f"longer than timeouts.run ({state.limits.run_seconds:g} s)", EXIT_FAILED)
        )
    effects: list[Effect] = []
    for name, process in state.processes.items():
        reason = _overdue(state, name, process, now=now)
        if reason and not process.killed_for:
            state = _put(state, name, replace(process, killed_for=reason))
            effects.append(Kill(name))
    state, started = _due(state, now)
    return state, (*effects, *started)


def _overdue(state: State, name: str, process: Process, *, now: float) -> str:
    if not process.running:
        return ""
    if process.serve_deadline is not None and now > process.serve_deadline:
        return f"no endpoints within {state.limits.serve_seconds:g} s"
    if name != SYNCER and now - process.heard_at > state.limits.stall_seconds:
        return f"nothing heard for {state.limits.stall_seconds:g} s"
    return ""


def _tick_stopping(state: State, now: float) -> Step:
    if state.stop_deadline is None or now <= state.stop_deadline:
        return state, ()
    if not state.killing:
        return _killing(state, now)
    assert state.fate is not None
    stuck = ", ".join(_title(name) for name, process in state.processes.items() if process.running)
    reason = "; ".join(part for part in (state.fate.reason, f"{stuck} did not end after SIGKILL") if part)
    return replace(state, status="ended"), (Finish(replace(state.fate, reason=reason)),)


def _put(state: State, name: str, process: Process) -> State:
    return replace(state, processes={**state.processes, name: process})


def _title(name: str) -> str:
    return "the syncer" if name == SYNCER else f"the driver of {name}"
