"""The agent: a node's `training.node.Node` as a Ray actor.

Ray places it, names it and tells when it died; commands and polls are the only traffic, a few a second, never on the
path of a step. Its death ends its zygote and its ranks. One agent per node, and nothing else of ours on a GPU node is a
Ray actor. Which machine it stands on is found out here: folders are given relative to the run's folder of the machine
(GKR_RUN_DIR), the plan is that of the machine (GKR_PLAN).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from spec.events import Check
from spec.names import group_resource
from spec.plan import NodePlan, Plan
from training.command_jobs import CommandNode, working_folder
from training.context import RuntimeContext
from training.node import Node, Snapshot, rank_jobs
from training.preflight import PreflightRequest, check_node
from training.processes import free_port


@ray.remote(max_restarts=0, max_task_retries=0)
class Agent:
    """All methods return quickly except `preflight`, `start` and `start_command`, which are bounded by the deadlines in
    `Node`."""

    def __init__(self, folder: str, *, command: bool) -> None:
        self._run_dir = Path(os.environ["GKR_RUN_DIR"])
        self._node = Node(folder=self._run_dir / folder)
        self._command = CommandNode(folder=self._run_dir / folder) if command else None
        if self._command is None:
            self._node.warm()

    def greet(self) -> dict[str, Any]:
        """Process id, address and the names of the place: the first call, whose answer says that the agent is there."""
        return {
            "pid": os.getpid(),
            "address": self.address(),
            "pod": os.environ.get("GKR_POD", ""),
            "machine": os.environ.get("GKR_POD_NODE", ""),
        }

    def zygote_pid(self) -> int:
        """Process id of the warm process."""
        return self._node.zygote_pid

    def preflight(self, plan: str, learner: str, node: str, log: str) -> list[dict[str, Any]]:
        """Run this node's checks."""
        parsed = Plan.read_json(plan)
        request = PreflightRequest.for_node(parsed, learner=learner, node=node)
        checks: list[Check] = check_node(request, node=self._node, log=self._run_dir / log)
        return [check.model_dump() for check in checks]

    def address(self) -> str:
        """Where the other nodes of the learner reach this one."""
        return str(ray.util.get_node_ip_address())

    def free_port(self) -> int:
        """A port for the rendezvous of an attempt, if this node holds rank 0."""
        return free_port(self.address())

    def start(self, context: dict[str, Any], ranks: dict[int, int], log_folder: str) -> dict[str, int]:
        """Fence what is older and fork the ranks of a new epoch; returns their process ids."""
        base = RuntimeContext(**context)
        own = dataclasses.replace(base, plan=os.environ["GKR_PLAN"], node_dir=str(self._node.folder))
        return self._node.spawn(rank_jobs(own, ranks=ranks, log_dir=self._run_dir / log_folder), epoch=own.epoch)

    def start_command(self, plan: str, job: str, environment: dict[str, str], log: str, epoch: int) -> dict[str, int]:
        """Fence what is older and start the person's command; returns its process id."""
        parsed = Plan.read_json(plan)
        assert self._command is not None
        assert parsed.run_script is not None
        return self._command.spawn(
            job,
            script=parsed.run_script,
            environment={**environment, "GKR_SERVICES": f"{self._node.directory_path}"},
            log=self._run_dir / log,
            working=working_folder(parsed),
            epoch=epoch,
        )

    def poll(self) -> dict[str, Any]:
        """The node's snapshot as plain data."""
        snapshot: Snapshot = (self._command or self._node).poll()
        return dataclasses.asdict(snapshot)

    def fence(self, epoch: int) -> None:
        """Kill everything older than `epoch`."""
        (self._command or self._node).fence(epoch)

    def set_directory(self, text: str) -> None:
        """The services' addresses, for this node's ranks."""
        self._node.set_directory(text)

    def close(self) -> None:
        """Kill the ranks and the zygote."""
        (self._command or self._node).close()


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A remote call that gave no answer."""

    text: str
    dead: bool
    timed_out: bool


def create(folder: str, *, node: NodePlan, command: bool) -> Any:
    """A new agent on some node of the group that has none; returns at once. It holds all GPUs of the node, which Ray
    would hide from it and its ranks otherwise."""
    options = {"num_cpus": 0, "num_gpus": node.gpus, "resources": {group_resource(node.group): 1}}
    return Agent.options(**options).remote(folder, command=command)  # type: ignore[attr-defined]


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


def answered(references: Sequence[Any], *, timeout_seconds: float) -> set[Any]:
    """Those whose answer, or failure, is there by then; waits for all of them."""
    if not references:
        return set()
    return set(ray.wait(list(references), num_returns=len(references), timeout=timeout_seconds)[0])


def present(group: str) -> int:
    """How many nodes of a group are in the Ray cluster now."""
    name = group_resource(group)
    return round(sum(node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]))


def kill(handle: Any) -> None:
    """End an agent at once; one that is gone already is fine."""
    ray.kill(handle, no_restart=True)
