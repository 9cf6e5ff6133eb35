"""The agent: a node's `training.node.Node` as a Ray actor.

Ray places it, names it and tells when it died; commands and polls are the only traffic, a few a second, never on the
path of a step. Its death ends its zygote and its ranks. One agent per node, and nothing else of ours on a GPU node is a
Ray actor.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from spec.events import Check
from spec.plan import Plan
from training.context import RuntimeContext
from training.node import Node, Snapshot, rank_jobs
from training.preflight import PreflightRequest, check_node
from training.processes import free_port


@ray.remote(max_restarts=0, max_task_retries=0)
class Agent:
    """All methods return quickly except `preflight` and `start`, which are bounded by the deadlines in `Node`."""

    def __init__(self, folder: str) -> None:
        self._node = Node(folder=Path(folder))
        self._node.warm()

    def pid(self) -> int:
        """Process id, for diagnosis and tests."""
        return os.getpid()

    def zygote_pid(self) -> int:
        """Process id of the warm process."""
        return self._node.zygote_pid

    def preflight(self, plan: str, learner: str, node: str, log: str) -> list[dict[str, Any]]:
        """Run this node's checks."""
        parsed = Plan.read_json(plan)
        request = PreflightRequest.for_node(parsed, learner=learner, node=node)
        checks: list[Check] = check_node(request, node=self._node, log=Path(log))
        return [check.model_dump() for check in checks]

    def address(self) -> str:
        """Where the other nodes of the learner reach this one."""
        return str(ray.util.get_node_ip_address())

    def free_port(self) -> int:
        """A port for the rendezvous of an attempt, if this node holds rank 0."""
        return free_port()

    def start(self, context: dict[str, Any], ranks: dict[int, int], log_dir: str) -> dict[str, int]:
        """Fence what is older and fork the ranks of a new epoch; returns their process ids."""
        base = RuntimeContext(**context)
        return self._node.spawn(rank_jobs(base, ranks=ranks, log_dir=Path(log_dir)), epoch=base.epoch)

    def poll(self) -> dict[str, Any]:
        """The node's snapshot as plain data."""
        snapshot: Snapshot = self._node.poll()
        return dataclasses.asdict(snapshot)

    def fence(self, epoch: int) -> None:
        """Kill everything older than `epoch`."""
        self._node.fence(epoch)

    def set_directory(self, text: str) -> None:
        """The services' addresses, for this node's ranks."""
        self._node.set_directory(text)

    def close(self) -> None:
        """Kill the ranks and the zygote."""
        self._node.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A remote call that gave no answer."""

    text: str
    dead: bool
    timed_out: bool


def create(folder: str, *, resource: str) -> Any:
    """A new agent on the node that offers `resource`; returns at once."""
    return Agent.options(num_cpus=0, resources={resource: 1}).remote(folder)  # type: ignore[attr-defined]


def result(reference: Any, *, timeout_seconds: float) -> Any:
    """The value of a remote call, or `Failed` if the agent died, raised, or did not answer in time."""
    try:
        return ray.get(reference, timeout=timeout_seconds)
    except ray.exceptions.GetTimeoutError:
        return Failed(f"no answer within {timeout_seconds:.0f} s", dead=False, timed_out=True)
    except ray.exceptions.RayActorError as error:
        killed = "SIGKILL" if "SIGKILL" in str(error) or "connection error code 2" in str(error) else "died"
        return Failed(killed, dead=True, timed_out=False)
    except ray.exceptions.RayTaskError as error:
        return Failed(str(error.cause), dead=False, timed_out=False)


def kill(handle: Any) -> None:
    """End an agent at once; one that is gone already is fine."""
    ray.kill(handle, no_restart=True)
