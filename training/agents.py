"""The agents of one learner as the driver reaches them: a handle per node, every call with a deadline.

A dead agent is an answer (`AgentLostError`), not an exception that could escape a poll. Ray itself is imported by
`training.agent` and `training.driver` only; what is needed of it here comes through `training.agent.remote`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spec.errors import GkrError
from spec.plan import LearnerPlan, Plan
from training import agent as remote
from training.context import RuntimeContext

CALL_DEADLINE_SECONDS = 30.0
SPAWN_DEADLINE_SECONDS = 180.0
POLL_DEADLINE_SECONDS = 5.0


class AgentLostError(Exception):
    """The agent of a node does not answer any more."""

    def __init__(self, node: str, cause: str, *, last_seen: float) -> None:
        super().__init__(f"{node}: {cause}")
        self.node, self.cause = node, cause
        self.monotonic = last_seen
        """Its last sign of life: it died after this, so times counted from here are upper bounds."""


class Agents:
    """One agent per node."""

    def __init__(self, learner: LearnerPlan, *, folder: Path) -> None:
        self._learner, self._folder = learner, folder
        self._handles: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self._seen: dict[str, float] = {}
        """When each agent last answered."""
        self._greetings: dict[str, Any] = {}
        """The first call to each new agent, whose answer says that it is there."""

    def start(self, node: str) -> None:
        """Ask for a new agent for this node; returns at once."""
        former = self._handles.get(node)
        if former is not None:
            remote.kill(former)
        self._pids.pop(node, None)
        self._handles[node] = remote.create(str(self._folder / node), resource=f"gkr_node_{node}")
        self._greetings[node] = self._handles[node].pid.remote()

    def ready(self, node: str) -> bool:
        """True once the new agent of this node answers."""
        if node in self._pids:
            return True
        answer = remote.result(self._greetings[node], timeout_seconds=0.0)
        if isinstance(answer, remote.Failed):
            if not answer.timed_out:
                self.start(node)
            return False
        self._pids[node] = int(answer)
        return True

    def pids(self) -> dict[str, int]:
        """`agent-0`, `zygote-0`, ... to process id."""
        asked = {node: handle.zygote_pid.remote() for node, handle in self._handles.items()}
        result: dict[str, int] = {}
        for index, (node, reference) in enumerate(asked.items()):
            result[f"agent-{index}"] = self._pids.get(node, 0)
            zygote = remote.result(reference, timeout_seconds=POLL_DEADLINE_SECONDS)
            result[f"zygote-{index}"] = 0 if isinstance(zygote, remote.Failed) else int(zygote)
        return result

    def preflight(
        self, plan: Plan, *, logs: dict[str, str], deadline_seconds: float
    ) -> dict[str, list[dict[str, Any]]]:
        """Every node's checks, run at once."""
        text = plan.write_json()
        asked = {
            node: handle.preflight.remote(text, self._learner.name, node, logs[node])
            for node, handle in self._handles.items()
        }
        deadline = time.monotonic() + deadline_seconds
        results: dict[str, list[dict[str, Any]]] = {}
        for node, reference in asked.items():
            answer = remote.result(reference, timeout_seconds=max(0.0, deadline - time.monotonic()))
            if isinstance(answer, remote.Failed):
                results[node] = [
                    {
                        "id": "A1",
                        "name": "agent answers",
                        "verdict": "FAIL",
                        "value": answer.text,
                        "threshold": f"an answer within {deadline_seconds:.0f} s",
                    }
                ]
                continue
            results[node] = answer
            self._pids[node] = int(self._call(node, "pid"))
        return results

    def spawn(self, context: RuntimeContext, *, ranks: dict[str, dict[int, int]], log_dir: Path) -> dict[str, int]:
        """Fork all ranks of a new epoch; node 0 holds the rendezvous. Returns process ids by `rank-N`."""
        first = next(iter(ranks))
        address, port = str(self._call(first, "address")), int(self._call(first, "free_port"))
        asked: dict[str, Any] = {}
        for node, own in ranks.items():
            placed = replace(
                context, node=node, node_dir=str(self._folder / node), master_addr=address, master_port=port
            )
            asked[node] = self._handles[node].start.remote(asdict(placed), own, str(log_dir))
        pids: dict[str, int] = {}
        for node, reference in asked.items():
            answer = remote.result(reference, timeout_seconds=SPAWN_DEADLINE_SECONDS)
            if isinstance(answer, remote.Failed):
                raise self._loss(node, answer.text)
            pids |= answer
        return pids

    def poll(self) -> Iterator[tuple[str, dict[str, Any] | AgentLostError]]:
        """Every node's snapshot, or its loss."""
        asked = {node: handle.poll.remote() for node, handle in self._handles.items() if node in self._pids}
        for node, reference in asked.items():
            answer = remote.result(reference, timeout_seconds=POLL_DEADLINE_SECONDS)
            if isinstance(answer, remote.Failed):
                self._pids.pop(node, None)
                yield node, self._loss(node, answer.text)
            else:
                self._seen[node] = time.monotonic()
                yield node, answer

    def fence(self, epoch: int) -> None:
        """Kill everything older than `epoch` on the nodes that answer; a lost node's ranks died with its agent."""
        asked = [handle.fence.remote(epoch) for node, handle in self._handles.items() if node in self._pids]
        for reference in asked:
            remote.result(reference, timeout_seconds=CALL_DEADLINE_SECONDS)

    def set_directory(self, text: str) -> None:
        """Hand service addresses to every node that answers."""
        for handle in self._handles.values():
            handle.set_directory.remote(text)

    def close(self) -> None:
        """End all agents and what they started."""
        asked = [handle.close.remote() for node, handle in self._handles.items() if node in self._pids]
        for reference in asked:
            remote.result(reference, timeout_seconds=POLL_DEADLINE_SECONDS)
        for handle in self._handles.values():
            remote.kill(handle)

    def _loss(self, node: str, cause: str) -> AgentLostError:
        return AgentLostError(node, cause, last_seen=self._seen.get(node, time.monotonic()))

    def _call(self, node: str, method: str) -> Any:
        answer = remote.result(getattr(self._handles[node], method).remote(), timeout_seconds=CALL_DEADLINE_SECONDS)
        if isinstance(answer, remote.Failed):
            raise self._loss(node, answer.text) if answer.dead else GkrError(f"{node}: {method}: {answer.text}")
        return answer
