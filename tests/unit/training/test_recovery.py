"""The recovery controller: what is retried, what is not, and that it always ends exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from training import recovery
from training.classify import Cause
from training.recovery import (
    AttemptOver,
    CancelAsked,
    Fence,
    Finish,
    NodeBack,
    NodesReady,
    Progress,
    StartAttempt,
    State,
)

KILLED = Cause(kind="killed", text="SIGKILL", ranks=(1,), signature="killed SIGKILL")
USER = Cause(
    kind="user",
    text="rank 0: ImportError: no module named x (train.py:3)",
    ranks=(0,),
    signature="user ImportError",
    exit_code=None,
)
UNKNOWN = Cause(kind="unknown", text="rank 0: OddError: odd", ranks=(0,), signature="unknown OddError")


def running(**changes: int) -> State:
    state, effects = recovery.step(State(), NodesReady())
    assert effects == [StartAttempt(1, 1, 0.0)]
    return recovery.replace(state, **changes)


def over(state: State, cause: Cause) -> tuple[State, list[recovery.Effect]]:
    return recovery.step(state, AttemptOver(state.attempt, cause))


def test_failed_checks_end_the_learner_with_the_preflight_code() -> None:
    state, effects = recovery.step(State(), NodesReady(("node-0: free disk: 1Gi",)))
    assert state.phase == "over"
    assert effects == [Finish(5, "preflight failed: node-0: free disk: 1Gi")]


def test_a_killed_rank_is_restarted_at_once_with_a_newer_epoch() -> None:
    state, effects = over(running(furthest=640), KILLED)
    assert effects == [StartAttempt(2, 2, 0.0)]
    assert (state.attempt, state.epoch) == (2, 2)


def test_a_user_error_ends_the_run_at_once_with_its_line() -> None:
    state, effects = over(running(), USER)
    assert state.phase == "over"
    assert effects == [Fence(2), Finish(100, USER.text)]


def test_a_user_error_with_a_code_of_its_own_keeps_it() -> None:
    _, effects = over(running(), Cause(kind="user", text="bad", exit_code=3))
    assert effects[-1] == Finish(3, "bad")


def test_numbers_that_are_not_finite_are_never_retried() -> None:
    _, effects = over(running(furthest=64), Cause(kind="numeric", text="loss is nan", signature="numeric"))
    assert isinstance(effects[-1], Finish)


def test_an_unknown_error_gets_one_confirmation_and_then_ends() -> None:
    state, effects = over(running(), UNKNOWN)
    assert isinstance(effects[0], StartAttempt)
    _, effects = over(state, UNKNOWN)
    assert isinstance(effects[-1], Finish)
    assert "came back 2 times" in effects[-1].reason


def test_progress_gives_the_budget_back() -> None:
    state = running()
    for count in range(1, 9):
        state, _ = recovery.step(state, Progress(count * 100))
        state, effects = over(state, KILLED)
        assert isinstance(effects[0], StartAttempt), f"restart {count}"


def test_three_restarts_without_progress_are_all_there_are() -> None:
    state = running()
    for _ in range(3):
        state, effects = over(state, KILLED)
        assert isinstance(effects[0], StartAttempt)
    _, effects = over(state, KILLED)
    assert isinstance(effects[-1], Finish)


def test_the_plan_says_how_often_is_tried_again_and_for_what() -> None:
    once = recovery.replace(running(), budget=1)
    state, effects = over(once, KILLED)
    assert isinstance(effects[0], StartAttempt)
    _, effects = over(state, KILLED)
    assert effects[-1] == Finish(100, "SIGKILL; 2 interruptions without a new step")

    never = recovery.replace(running(), retried=frozenset({"node-failure"}))
    _, effects = over(never, KILLED)
    assert effects[-1] == Finish(100, "SIGKILL; retry.on does not name rank-death")
    _, effects = over(never, Cause(kind="node_lost", text="node-0 died", signature="node node-0"))
    assert isinstance(effects[0], StartAttempt)


def test_the_end_of_an_older_attempt_is_never_acted_upon() -> None:
    state, _ = over(running(furthest=640), KILLED)
    again, effects = recovery.step(state, AttemptOver(1, KILLED))
    assert (again, effects) == (state, [])


def test_a_lost_node_is_replaced_before_the_next_attempt() -> None:
    state, effects = recovery.lost_nodes(running(furthest=640), nodes=("node-0",))
    assert effects == [recovery.ReplaceNode("node-0")]
    state, effects = over(state, Cause(kind="node_lost", text="node-0 SIGKILL", signature="node node-0"))
    assert effects == [Fence(2)]
    assert state.phase == "waiting_node"
    state, effects = recovery.step(state, NodeBack("node-0"))
    assert effects == [StartAttempt(2, 3, 0.0)]


def test_a_node_that_is_never_replaced_ends_the_learner_with_its_name() -> None:
    state, _ = recovery.lost_nodes(running(furthest=640), nodes=("node-0",))
    state, _ = over(state, Cause(kind="node_lost", text="node-0 SIGKILL", signature="node node-0"))
    _, effects = recovery.step(state, recovery.NodeOverdue("node-0", 180.0))
    assert effects == [Fence(3), Finish(100, "node node-0 has no agent 180 s after it was lost")]


def test_cancel_fences_and_ends() -> None:
    _, effects = recovery.step(running(), CancelAsked())
    assert effects == [Fence(2), Finish(103, "cancelled")]


CAUSES = st.sampled_from(
    [
        KILLED,
        USER,
        UNKNOWN,
        Cause(kind="hang", text="no progress", signature="hang"),
        Cause(kind="node_lost", text="node-0 SIGKILL", signature="node node-0"),
        Cause(kind="finished", text="finished"),
        Cause(kind="syncer", text="no syncer", signature="syncer"),
    ]
)
EVENTS = st.one_of(
    st.builds(NodesReady),
    st.builds(Progress, st.integers(0, 10_000)),
    st.builds(AttemptOver, st.integers(0, 12), CAUSES),
    st.builds(NodeBack, st.just("node-0")),
    st.builds(CancelAsked),
    st.just("lose"),
)


@given(st.lists(EVENTS, max_size=60))
def test_attempts_and_epochs_only_grow_and_there_is_one_end(events: list[object]) -> None:
    state, starts, finishes, without_progress = State(), [], 0, 0
    for event in events:
        before = state
        if event == "lose":
            state, effects = recovery.lost_nodes(state, nodes=("node-0",)) if state.phase == "running" else (state, [])
        else:
            state, effects = recovery.step(state, event)  # type: ignore[arg-type]
        assert state.attempt >= before.attempt
        assert state.epoch >= before.epoch
        for effect in effects:
            if isinstance(effect, StartAttempt):
                starts.append((effect.attempt, effect.epoch))
                without_progress = without_progress + 1 if before.furthest <= before.furthest_at_start else 1
            finishes += isinstance(effect, Finish)
        assert finishes <= 1
        if finishes:
            assert state.phase == "over"
    assert starts == sorted(set(starts))
    assert without_progress <= recovery.BUDGET_WITHOUT_PROGRESS + 1
