"""The recovery controller of one learner: a pure function from state and event to state and effects.

The driver feeds it what it observes and carries out what it answers. No clock, no I/O: times arrive inside events. What
it promises: never a retry without a classified cause, never more than the budget without new progress, every attempt
numbered, every spawn with an epoch newer than anything that may still run, and exactly one end.

Words: an attempt is one life of all ranks of the learner; an epoch fences. Both only grow and, here, grow together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from spec.errors import EXIT_FAILED, EXIT_OK, EXIT_PREFLIGHT
from training.classify import Cause

BUDGET_WITHOUT_PROGRESS = 3
"""Restarts for a general cause without a step beyond the furthest one, unless the plan says otherwise."""
BUDGET_SAME_SIGNATURE = 1
"""Restarts for an unknown error that comes back with the same signature and no progress in between."""


ALL_CAUSES = frozenset({"preemption", "node-failure", "rank-death", "collective-timeout", "service-failure"})
"""What a plan's `retry.on` may name."""
_CAUSES: Mapping[str, frozenset[str]] = {
    "killed": frozenset({"rank-death"}),
    "node_lost": frozenset({"node-failure", "preemption"}),
    "hang": frozenset({"collective-timeout"}),
    "cascade": frozenset({"collective-timeout"}),
}
"""Kind of a cause to the plan's words for it; kinds that are not here have rules of their own."""


# --- events


@dataclass(frozen=True, slots=True)
class NodesReady:
    """Every node has an agent and passed or failed its checks."""

    failed_checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """The furthest position of this attempt's rank 0."""

    position: int


@dataclass(frozen=True, slots=True)
class AttemptOver:
    """All ranks of the attempt ended or must end, with the classified cause."""

    attempt: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class NodeBack:
    """A replacement agent stands where one was lost."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeOverdue:
    """The replacement of a lost agent does not come."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """A person wants the run to end."""


Event = NodesReady | Progress | AttemptOver | NodeBack | NodeOverdue | CancelAsked

# --- effects


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """Fence everything older than the epoch, then spawn all ranks."""

    attempt: int
    epoch: int
    after_seconds: float


@dataclass(frozen=True, slots=True)
class Fence:
    """Kill everything older than the epoch on all nodes."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ReplaceNode:
    """Start a new agent for a lost node."""

    node: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End the learner with this exit code."""

    exit_code: int
    reason: str


Effect = StartAttempt | Fence | ReplaceNode | Finish

# --- state


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the controller remembers."""

    phase: Literal["preparing", "running", "waiting_node", "over"] = "preparing"
    attempt: int = 0
    epoch: int = 0
    furthest: int = 0
    """Furthest position over all attempts."""
    furthest_at_start: int = 0
    """Furthest position when the current attempt began."""
    restarts_without_progress: int = 0
    signatures: tuple[tuple[str, int], ...] = ()
    """Signature to restarts since the last progress."""
    missing_nodes: frozenset[str] = frozenset()
    budget: int = BUDGET_WITHOUT_PROGRESS
    """The plan's `retry.max`."""
    retried: frozenset[str] = ALL_CAUSES
    """The plan's `retry.on`."""


def step(state: State, event: Event, /) -> tuple[State, list[Effect]]:
    """One transition."""
    if state.phase == "over":
        return state, []
    match event:
        case NodesReady(failed_checks=failed):
            return _nodes_ready(state, failed=failed)
        case Progress(position=position):
            return replace(state, furthest=max(state.furthest, position)), []
        case AttemptOver():
            return _attempt_over(state, event)
        case NodeBack(node=node):
            return _node_back(state, node=node)
        case NodeOverdue(node=node, seconds=seconds):
            return _node_overdue(state, node=node, seconds=seconds)
        case CancelAsked():
            return replace(state, phase="over", epoch=state.epoch + 1), [
                Fence(state.epoch + 1),
                Finish(103, "cancelled"),
            ]


def lost_nodes(state: State, *, nodes: tuple[str, ...]) -> tuple[State, list[Effect]]:
    """Nodes whose agent died; each gets a replacement. The attempt's end is a separate event."""
    new = [node for node in nodes if node not in state.missing_nodes]
    return replace(state, missing_nodes=state.missing_nodes | frozenset(new)), [ReplaceNode(node) for node in new]


def _nodes_ready(state: State, *, failed: tuple[str, ...]) -> tuple[State, list[Effect]]:
    if state.phase != "preparing":
        return state, []
    if failed:
        return replace(state, phase="over"), [Finish(EXIT_PREFLIGHT, "preflight failed: " + "; ".join(failed))]
    return _start(state, after_seconds=0.0)


def _attempt_over(state: State, event: AttemptOver) -> tuple[State, list[Effect]]:
    if event.attempt != state.attempt or state.phase != "running":
        return state, []  # of an older attempt: logged by the driver, never acted upon
    cause = event.cause
    if cause.kind == "finished":
        return replace(state, phase="over"), [Finish(EXIT_OK, "finished")]
    state = _account(state, signature=cause.signature)
    verdict = _refusal(state, cause=cause)
    if verdict is not None:
        epoch = state.epoch + 1
        return replace(state, phase="over", epoch=epoch), [
            Fence(epoch),
            Finish(cause.exit_code or EXIT_FAILED, verdict),
        ]
    if state.missing_nodes:
        epoch = state.epoch + 1
        return replace(state, phase="waiting_node", epoch=epoch), [Fence(epoch)]
    return _start(state, after_seconds=_backoff(state.restarts_without_progress))


def _account(state: State, *, signature: str) -> State:
    if state.furthest > state.furthest_at_start:
        return replace(state, restarts_without_progress=1, signatures=((signature, 1),))
    counts: Mapping[str, int] = dict(state.signatures)
    counts = {**counts, signature: counts.get(signature, 0) + 1}
    return replace(
        state, restarts_without_progress=state.restarts_without_progress + 1, signatures=tuple(sorted(counts.items()))
    )


def _refusal(state: State, *, cause: Cause) -> str | None:
    """Why the learner is not restarted; none if it is."""
    if cause.kind == "user":
        return cause.text
    if cause.kind == "numeric":
        return f"{cause.text}; the last good checkpoint is kept"
    again = dict(state.signatures).get(cause.signature, 0)
    if cause.kind in {"unknown", "syncer"} and again > BUDGET_SAME_SIGNATURE:
        return f"{cause.text}; the same error came back {again} times without progress"
    words = _CAUSES.get(cause.kind, ALL_CAUSES)
    if not words & state.retried:
        return f"{cause.text}; retry.on does not name {' or '.join(sorted(words))}"
    if state.restarts_without_progress > state.budget:
        return f"{cause.text}; {state.restarts_without_progress} interruptions without a new step"
    return None


def _node_back(state: State, *, node: str) -> tuple[State, list[Effect]]:
    missing = state.missing_nodes - {node}
    state = replace(state, missing_nodes=missing)
    if state.phase != "waiting_node" or missing:
        return state, []
    return _start(state, after_seconds=0.0)


def _node_overdue(state: State, *, node: str, seconds: float) -> tuple[State, list[Effect]]:
    if node not in state.missing_nodes:
        return state, []
    epoch = state.epoch + 1
    reason = f"node {node} has no agent {seconds:.0f} s after it was lost"
    return replace(state, phase="over", epoch=epoch), [Fence(epoch), Finish(EXIT_FAILED, reason)]


def _start(state: State, *, after_seconds: float) -> tuple[State, list[Effect]]:
    attempt, epoch = state.attempt + 1, state.epoch + 1
    state = replace(state, phase="running", attempt=attempt, epoch=epoch, furthest_at_start=state.furthest)
    return state, [StartAttempt(attempt, epoch, after_seconds)]


def _backoff(restarts: int) -> float:
    """Seconds before a restart: none for the first, then 1, 5, 30."""
    return (0.0, 0.0, 1.0, 5.0, 30.0)[min(restarts, 4)]
