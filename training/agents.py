"""The agents of one learner as the driver reaches them: a handle per node, every call with a deadline.

A dead agent is an answer (`AgentLostError`), not an exception that could escape a poll. Ray itself is imported by
`training.agent` and `training.driver` only; what is needed of it here comes through `training.agent.remote`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from spec.errors import GkrError
from spec.plan import LearnerPlan, Plan
from training import agent as remote
from training.command_jobs import command_environment
from training.context import RuntimeContext
from training.options import log_folder, node_folder

log = logging.getLogger("agents")

CALL_DEADLINE_SECONDS = 30.0
SPAWN_DEADLINE_SECONDS = 180.0
POLL_WAIT_SECONDS = 0.5
"""Longest wait for all snapshots of one look; a slower agent answers a later look."""
POLL_DEADLINE_SECONDS = 15.0
"""An agent that does not answer for so long is lost, also if Ray does not know it yet: its machine may be cut off."""
ZYGOTE_DEADLINE_SECONDS = 5.0
AGAIN_SECONDS = 2.0
"""Shortest time between two tries to start an agent."""


class AgentLostError(Exception):
    """The agent of a node does not answer any more."""

    def __init__(self, node: str, cause: str, *, last_seen: float) -> None:
        super().__init__(f"{node}: {cause}")
        self.node, self.cause = node, cause
        self.monotonic = last_seen
        """Its last sign of life: it died after this, so times counted from here are upper bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an agent stands."""

    pid: int
    address: str
    pod: str
    machine: str


class Agents:
    """One agent per node."""

    def __init__(self, plan: Plan, *, learner: LearnerPlan) -> None:
        self._plan, self._learner = plan, learner
        self._text = plan.write_json()
        self._nodes = {node.name: node for node in learner.nodes}
        self._handles: dict[str, Any] = {}
        self._places: dict[str, Place] = {}
        """Of the agents that are there."""
        self._seen: dict[str, float] = {}
        """When each agent last answered."""
        self._begun: dict[str, float] = {}
        """When each agent was asked for."""
        self._greetings: dict[str, Any] = {}
        """The first call to each new agent, whose answer says that it is there."""
        self._asked: dict[str, tuple[Any, float]] = {}
        """Polls under way, and since when."""

    def start(self, node: str) -> None:
        """Ask for a new agent for this node; returns at once."""
        former = self._handles.get(node)
        if former is not None:
            remote.kill(former)
        self._forget(node)
        self._handles[node] = remote.create(
            node_folder(self._learner.name, node=node),
            node=self._nodes[node],
            command=self._plan.run_script is not None,
        )
        self._greetings[node] = self._handles[node].greet.remote()
        self._begun[node] = time.monotonic()

    def ready(self, node: str) -> bool:
        """True once the new agent of this node answers."""
        if node in self._places:
            return True
        answer = remote.result(self._greetings[node], timeout_seconds=0.0)
        if isinstance(answer, remote.Failed):
            if not answer.timed_out and time.monotonic() - self._begun[node] > AGAIN_SECONDS:
                log.warning("the new agent of %s did not come up (%s); starting another", node, answer.text)
                self.start(node)
            return False
        self._places[node] = Place(**answer)
        self._seen[node] = time.monotonic()
        log.info("agent of %s: %s", node, self._places[node])
        return True

    def missing(self) -> dict[str, int]:
        """Group to how many of its nodes have no agent yet."""
        return Counter(self._nodes[node].group for node in self._handles if not self.ready(node))

    def present(self, group: str) -> int:
        """How many nodes of a group are in the Ray cluster."""
        return remote.present(group)

    def places(self) -> dict[str, Place]:
        """Node to where its agent stands."""
        return dict(self._places)

    def pids(self) -> dict[str, int]:
        """`agent-0`, `zygote-0`, ... to process id."""
        asked = {node: handle.zygote_pid.remote() for node, handle in self._handles.items()}
        remote.answered(list(asked.values()), timeout_seconds=ZYGOTE_DEADLINE_SECONDS)
        result: dict[str, int] = {}
        for index, (node, reference) in enumerate(asked.items()):
            place = self._places.get(node)
            result[f"agent-{index}"] = place.pid if place else 0
            zygote = remote.result(reference, timeout_seconds=0.0)
            result[f"zygote-{index}"] = 0 if isinstance(zygote, remote.Failed) else int(zygote)
        return result

    def preflight(self, *, logs: dict[str, str], deadline_seconds: float) -> dict[str, list[dict[str, Any]]]:
        """Every node's checks, run at once; `logs` are relative to the run's folder."""
        asked = {
            node: self._handles[node].preflight.remote(self._text, self._learner.name, node, path)
            for node, path in logs.items()
        }
        remote.answered(list(asked.values()), timeout_seconds=deadline_seconds)
        return {node: self._checks(node, reference, deadline_seconds) for node, reference in asked.items()}

    def spawn(self, context: RuntimeContext, *, ranks: dict[str, dict[int, int]]) -> dict[str, int]:
        """Start all processes of a new epoch; node 0 holds the rendezvous. Returns process ids by `rank-N`."""
        first = next(iter(ranks))
        place = self._places.get(first)
        if place is None:
            raise self._loss(first, "died")
        address, port = place.address, int(self._call(first, "free_port"))
        logs = log_folder(self._learner.name, attempt=context.attempt)
        asked: dict[str, Any] = {}
        for index, (node, own) in enumerate(ranks.items()):
            placed = replace(context, node=node, master_addr=address, master_port=port)
            if self._plan.run_script is None:
                asked[node] = self._handles[node].start.remote(asdict(placed), own, logs)
                continue
            environment = command_environment(
                self._plan, learner=self._learner, node=node, attempt=context.attempt, master=(address, port)
            )
            asked[node] = self._handles[node].start_command.remote(
                self._text, f"rank-{index}", environment, f"{logs}/rank-{index}.log", context.epoch
            )
        remote.answered(list(asked.values()), timeout_seconds=SPAWN_DEADLINE_SECONDS)
        pids: dict[str, int] = {}
        for node, reference in asked.items():
            answer = remote.result(reference, timeout_seconds=0.0)
            if isinstance(answer, remote.Failed):
                raise self._loss(node, answer.text)
            pids |= answer
        return pids

    def poll(self) -> Iterator[tuple[str, dict[str, Any] | AgentLostError]]:
        """The snapshots that are there, and the losses. One look at a time is under way per agent."""
        now = time.monotonic()
        for node in self._places:
            if node not in self._asked:
                self._asked[node] = (self._handles[node].poll.remote(), now)
        ready = remote.answered([one for one, _ in self._asked.values()], timeout_seconds=POLL_WAIT_SECONDS)
        for node, (reference, since) in list(self._asked.items()):
            if reference in ready:
                answer = remote.result(reference, timeout_seconds=0.0)
                del self._asked[node]
            elif time.monotonic() - since > POLL_DEADLINE_SECONDS:
                answer = remote.Failed(f"no answer for {POLL_DEADLINE_SECONDS:.0f} s", dead=False, timed_out=True)
            else:
                continue
            if isinstance(answer, remote.Failed):
                lost = self._loss(node, answer.text)
                self._forget(node)
                yield node, lost
            else:
                self._seen[node] = since
                yield node, answer

    def answered_since(self, moment: float) -> bool:
        """True if every agent that is there was asked after that moment and has answered."""
        return all(self._seen.get(node, 0.0) > moment for node in self._places)

    def fence(self, epoch: int) -> None:
        """Kill everything older than `epoch` on the nodes that answer; a lost node's ranks died with its agent."""
        asked = [self._handles[node].fence.remote(epoch) for node in self._places]
        remote.answered(asked, timeout_seconds=CALL_DEADLINE_SECONDS)

    def set_directory(self, text: str) -> None:
        """Hand service addresses to every node."""
        for handle in self._handles.values():
            handle.set_directory.remote(text)

    def close(self) -> None:
        """End all agents and what they started."""
        asked = [self._handles[node].close.remote() for node in self._places]
        remote.answered(asked, timeout_seconds=POLL_DEADLINE_SECONDS)
        for handle in self._handles.values():
            remote.kill(handle)

    def _checks(self, node: str, reference: Any, deadline_seconds: float) -> list[dict[str, Any]]:
        answer = remote.result(reference, timeout_seconds=0.0)
        if not isinstance(answer, remote.Failed):
            return answer
        check = {
            "id": "A1",
            "name": "agent answers",
            "verdict": "FAIL",
            "value": answer.text,
            "threshold": f"an answer within {deadline_seconds:.0f} s",
        }
        return [check]

    def _forget(self, node: str) -> None:
        self._places.pop(node, None)
        self._asked.pop(node, None)

    def _loss(self, node: str, cause: str) -> AgentLostError:
        return AgentLostError(node, cause, last_seen=self._seen.get(node, time.monotonic()))

    def _call(self, node: str, method: str) -> Any:
        answer = remote.result(getattr(self._handles[node], method).remote(), timeout_seconds=CALL_DEADLINE_SECONDS)
        if isinstance(answer, remote.Failed):
            lost = answer.dead or answer.timed_out
            raise self._loss(node, answer.text) if lost else GkrError(f"{node}: {method}: {answer.text}")
        return answer
