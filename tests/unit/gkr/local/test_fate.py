"""The supervisor's decisions, without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gkr.local import fate
from gkr.local.states import (
    SYNCER,
    Begin,
    Broken,
    CancelAsked,
    Effect,
    Emit,
    Endpoints,
    Exited,
    Finish,
    Heard,
    Input,
    Kill,
    Limits,
    Serving,
    StartDriver,
    StartSyncer,
    State,
    Terminate,
    Tick,
)  # fmt: skip
from spec.events import AttemptStarted, Note, StepMetrics

ENDPOINTS = Endpoints("127.0.0.1:7001", "127.0.0.1:7002")


def _run(
    *inputs: Input, learners: tuple[str, ...] = ("east", "west"), synced: bool = True, limits: Limits | None = None
) -> tuple[State, list[Effect]]:
    """The state after all inputs, and the effects of the last."""
    state = fate.initial(list(learners), with_syncer=synced, batch=64, limits=limits or Limits())
    effects: tuple[Effect, ...] = ()
    for one in inputs:
        state, effects = fate.step(state, one)
    return state, [effect for effect in effects if not isinstance(effect, Emit)]


def _step(learner: str, step: int, *, attempt: int = 1) -> StepMetrics:
    return StepMetrics(
        time=0,
        source=f"rank/{learner}/0",
        learner=learner,
        attempt=attempt,
        step=step,
        position=step * 64,
        round=0,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        steps_per_second=1.0,
        samples_per_second=64.0,
    )


UP = (Begin(0), Serving(1, ENDPOINTS))


def test_drivers_start_only_when_the_syncer_serves() -> None:
    assert _run(Begin(0))[1] == [StartSyncer(1, None)]
    assert _run(*UP)[1] == [StartDriver("east", 1, ENDPOINTS), StartDriver("west", 1, ENDPOINTS)]


def test_without_a_syncer_drivers_start_at_once() -> None:
    assert _run(Begin(0), synced=False, learners=("only",))[1] == [StartDriver("only", 1, None)]


@pytest.mark.parametrize(
    ("code", "want_retry"),
    [
        (-9, True),
        (-11, True),
        (-15, True),
        (4, True),
        (101, True),
        (1, False),
        (2, False),
        (3, False),
        (5, False),
        (6, False),
        (100, False),
        (77, False),
    ],
)
def test_only_classified_causes_are_retried(code: int, want_retry: bool) -> None:
    assert fate.classify(code).retry is want_retry


def test_the_first_restart_is_at_once_and_later_ones_back_off() -> None:
    inputs: list[Input] = [*UP, Exited(2, "east", -9, 0.1)]
    assert _run(*inputs)[1] == [StartDriver("east", 2, ENDPOINTS)]
    inputs.append(Exited(3, "east", -9, 0.1))
    assert _run(*inputs)[1] == []
    assert _run(*inputs, Tick(4.9))[1] == []
    assert _run(*inputs, Tick(5.0))[1] == [StartDriver("east", 3, ENDPOINTS)]


def test_a_death_is_said_when_it_happens_and_not_only_once_the_next_attempt_steps() -> None:
    state, _ = _run(*UP)
    told: list[str] = []
    for death in (Exited(2, "east", -9, 0.1), Exited(3, "east", -9, 0.1), Exited(4, SYNCER, -11, 0.1)):
        state, effects = fate.step(state, death)
        told += [one.event.text for one in effects if isinstance(one, Emit) and isinstance(one.event, Note)]
    assert told == [
        "the driver of east ended with SIGKILL; it is started again as attempt 2",
        "the driver of east ended with SIGKILL; it is started again as attempt 3 in 2 s",
        "the syncer ended with SIGSEGV; it is started again as attempt 2",
    ]


def test_progress_gives_the_budget_back_and_repeating_old_steps_does_not() -> None:
    deaths: list[Input] = [*UP, Heard(1, _step("east", 5))]
    for attempt in range(1, 8):
        deaths += [
            Exited(attempt, "east", -9, 0.1),
            Tick(attempt + 0.99),
            Heard(attempt + 0.99, _step("east", 5 + attempt, attempt=attempt + 1)),
        ]
    assert _run(*deaths)[0].fate is None
    stuck: list[Input] = [*UP, Heard(1, _step("east", 5))]
    for attempt in range(1, 5):
        stuck += [
            Exited(100 * attempt, "east", -9, 0.1),
            Tick(100 * attempt + 50),
            Heard(100 * attempt + 51, _step("east", 5, attempt=attempt + 1)),
        ]
    state = _run(*stuck)[0]
    assert state.fate is not None
    assert "after 3 restarts without progress" in state.fate.reason


def test_attempts_count_on_from_those_the_driver_made_itself() -> None:
    started = AttemptStarted(time=0, source="driver/east", learner="east", attempt=4, epoch=4, world_size=2)
    assert _run(*UP, Heard(2, started), Exited(3, "east", -9, 0.1))[1] == [StartDriver("east", 5, ENDPOINTS)]


def test_recovery_ends_with_the_first_step_of_a_later_attempt_however_starts_were_numbered() -> None:
    """A driver that dies before it has ranks uses up a start of ours but no attempt of its own."""
    started = AttemptStarted(time=0, source="driver/east", learner="east", attempt=1, epoch=1, world_size=2)
    inputs: list[Input] = [*UP, Heard(2, started), Heard(3, _step("east", 5))]
    inputs += [Exited(4, "east", -9, 0.1), Exited(5, "east", -9, 0.1), Tick(8)]
    state, _ = _run(*inputs, Heard(9, _step("east", 5)))
    assert state.processes["east"].pending is not None, "a step of the dead attempt is not a recovery"
    state, _ = _run(*inputs, Heard(10, _step("east", 6, attempt=2)))
    assert (state.processes["east"].attempt, state.processes["east"].pending) == (3, None)


def test_a_restarted_syncer_gets_its_former_ports_and_drivers_are_left_alone() -> None:
    assert _run(*UP, Exited(2, SYNCER, -9, 0.1))[1] == [StartSyncer(2, ENDPOINTS)]
    assert _run(*UP, Exited(2, SYNCER, -9, 0.1), Serving(3, ENDPOINTS))[1] == []
    moved = _run(*UP, Exited(2, SYNCER, -9, 0.1), Serving(3, Endpoints("127.0.0.1:1", "127.0.0.1:2")))[0]
    assert moved.fate is not None
    assert moved.fate.status == "failed"


def test_the_syncer_is_stopped_after_the_last_driver() -> None:
    stopping: list[Input] = [*UP, CancelAsked(2, hard=False)]
    assert _run(*stopping)[1] == [Terminate("east"), Terminate("west")]
    stopping.append(Exited(3, "east", 103, 0.1))
    assert _run(*stopping)[1] == []
    stopping.append(Exited(4, "west", 103, 0.1))
    assert _run(*stopping)[1] == [Terminate(SYNCER)]
    state, effects = _run(*stopping, Exited(5, SYNCER, 0, 0.1))
    assert state.fate is not None
    assert effects == [Finish(state.fate)]
    assert state.fate.exit_code == 103


def test_stopping_escalates_and_ends_even_if_a_process_cannot_be_killed() -> None:
    limits = Limits(grace_seconds=10, kill_seconds=5)
    stopping: list[Input] = [Begin(0), CancelAsked(1, hard=False)]
    assert _run(*stopping, Tick(10), synced=False, learners=("east",), limits=limits)[1] == []
    assert _run(*stopping, Tick(12), synced=False, learners=("east",), limits=limits)[1] == [Kill("east")]
    (finish,) = _run(*stopping, Tick(12), Tick(18), synced=False, learners=("east",), limits=limits)[1]
    assert isinstance(finish, Finish)
    assert "did not end after SIGKILL" in finish.fate.reason


def test_a_hard_cancel_kills_at_once_also_while_stopping_softly() -> None:
    assert Kill("east") in _run(*UP, CancelAsked(2, hard=True))[1]
    assert Kill("east") in _run(*UP, CancelAsked(2, hard=False), CancelAsked(3, hard=True))[1]


def test_a_cancel_before_anything_runs_ends_the_run() -> None:
    dead: list[Input] = [Begin(0), Exited(1, SYNCER, -9, 0.0), Exited(2, SYNCER, -9, 0.0)]
    (finish,) = _run(*dead, CancelAsked(3, hard=True))[1]
    assert isinstance(finish, Finish)


def test_a_silent_driver_is_killed_and_its_restart_says_why() -> None:
    limits = Limits(stall_seconds=100)
    inputs: list[Input] = [*UP, Heard(90, _step("west", 1)), Tick(150)]
    assert _run(*inputs, limits=limits)[1] == [Kill("east")]
    state, effects = _run(*inputs, Exited(151, "east", -9, 0.0), limits=limits)
    assert effects == [StartDriver("east", 2, ENDPOINTS)]
    pending = state.processes["east"].pending
    assert pending is not None
    assert pending.cause == "nothing heard for 100 s"


def test_a_run_has_a_longest_time() -> None:
    state, _ = _run(*UP, Tick(61), limits=Limits(run_seconds=60))
    assert state.fate is not None
    assert "timeouts.run" in state.fate.reason


def test_the_reason_is_what_the_driver_said_rather_than_the_last_line_of_its_log() -> None:
    said = Note(time=0, source="driver/east", level="error", text="batch 7 has no labels")
    state, _ = _run(*UP, Heard(2, said), Exited(3, "east", 100, 0.1, "bye"))
    assert state.fate is not None
    assert state.fate.reason == "the driver of east ended with exit code 100: batch 7 has no labels"


def test_the_first_fate_counts() -> None:
    state, _ = _run(*UP, Exited(2, "east", 5, 0.1), CancelAsked(3, hard=False), Broken(4, "disk full"))
    assert state.fate is not None
    assert state.fate.exit_code == 5


def test_nothing_happens_after_the_end() -> None:
    state, _ = _run(Begin(0), Exited(1, "east", 0, 0.1), synced=False, learners=("east",))
    assert state.status == "ended"
    assert fate.step(state, Tick(10**9)) == (state, ())
    assert fate.step(replace(state), CancelAsked(5, hard=True))[1] == ()
