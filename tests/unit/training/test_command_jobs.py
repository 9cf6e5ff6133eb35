"""A person's command on a node: started with what was promised, watched, and gone when it must be."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from spec.errors import GkrError
from spec.plan import NodePlan
from tests.builders.local_runs import plan
from training.classify import RankEnd, classify_commands
from training.command_jobs import CommandNode, command_environment, working_folder
from training.node import Snapshot

SECONDS = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CommandNode]:
    made = CommandNode(folder=tmp_path / "node")
    yield made
    made.close()


def until(holds: Callable[[], bool]) -> None:
    deadline, tick = time.monotonic() + SECONDS, threading.Event()
    while not holds():
        assert time.monotonic() < deadline
        tick.wait(0.02)


def ended(node: CommandNode) -> Snapshot:
    until(lambda: bool(node.poll().exits))
    return node.poll()


def start(node: CommandNode, script: str, *, epoch: int = 1, **environment: str) -> dict[str, int]:
    log = node.folder.parent / "rank-0.log"
    return node.spawn("rank-0", script=script, environment=environment, log=log, working=None, epoch=epoch)


def test_a_script_gets_its_bytes_its_environment_and_its_exit_code(node: CommandNode) -> None:
    script = "cat <<'EOF'\n$not `here` \"x\" 'y' é\nEOF\necho \"$GKR_TEST\"\nexit 3\n"
    start(node, script, GKR_TEST='a: b = "c"')
    assert [(one.job, one.code) for one in ended(node).exits] == [("rank-0", 3)]
    log = (node.folder.parent / "rank-0.log").read_text()
    assert log == '$not `here` "x" \'y\' é\na: b = "c"\n'


def test_a_fence_ends_everything_also_what_left_the_session_and_ignores_sigterm(node: CommandNode) -> None:
    pids = node.folder.parent / "pids"
    start(node, f"trap '' TERM\nsetsid sh -c 'trap \"\" TERM; echo $$ > {pids}; sleep 600' &\nsleep 600\nwait\n")
    until(lambda: pids.exists() and bool(pids.read_text().strip()))
    assert node.poll().running
    node.fence(2)
    assert not psutil.pid_exists(int(pids.read_text()))
    with pytest.raises(GkrError, match="epoch 2 is not newer than 2"):
        start(node, "true", epoch=2)


def test_a_command_gets_the_chance_to_end_itself(node: CommandNode) -> None:
    ready = node.folder.parent / "ready"
    start(node, f"trap 'echo saved; exit 0' TERM\ntouch {ready}\nsleep 600 & wait\n")
    until(ready.exists)
    node.fence(2)
    assert (node.folder.parent / "rank-0.log").read_text() == "saved\n"


def test_nothing_outlives_a_command_that_ended(node: CommandNode) -> None:
    pid = node.folder.parent / "pid"
    start(node, f"sleep 600 & echo $! > {pid}\nexit 0\n")
    assert [one.code for one in ended(node).exits] == [0]
    assert not psutil.pid_exists(int(pid.read_text()))


def test_nothing_outlives_an_agent_that_died(node: CommandNode) -> None:
    pids = start(node, "sleep 600\n")
    keeper = psutil.Process(pids["rank-0"])
    until(lambda: bool(keeper.children(recursive=True)))
    family = [keeper, *keeper.children(recursive=True)]
    assert node._keeper is not None
    assert node._keeper.stdin is not None
    os.close(os.dup(node._keeper.stdin.fileno()))
    node._keeper.stdin.close()  # what the kernel does for an agent that is gone
    node._keeper.wait(timeout=SECONDS)
    until(lambda: not any(one.is_running() for one in family))
    node._keeper = None


def test_every_node_is_told_its_place() -> None:
    shape: dict[str, Any] = {"machine": "a3-ultra", "cpu": 1, "memory": 2**31, "shm": 2**28}
    nodes = [
        NodePlan(name=f"{group}-{index}", group=group, ranks=gpus, gpus=gpus, **shape)
        for group, gpus, count in (("main", 8, 2), ("side", 4, 1))
        for index in range(count)
    ]
    made = plan("east")
    learner = made.learners[0].model_copy(update={"nodes": nodes})
    told = [
        command_environment(made, learner=learner, node=node.name, attempt=2, master=("10.0.0.5", 4711))
        for node in nodes
    ]
    assert [one["GKR_NODE_RANK"] for one in told] == ["0", "1", "2"]
    assert [one["GKR_GROUP"] for one in told] == ["main", "main", "side"]
    assert [one["GKR_GPUS"] for one in told] == ["8", "8", "4"]
    assert {one["GKR_NODES"] for one in told} == {"3"}
    assert {(one["GKR_MASTER_ADDR"], one["GKR_MASTER_PORT"]) for one in told} == {("10.0.0.5", "4711")}
    assert told[0]["GKR_LEARNER"] == "east"
    assert told[0]["GKR_RUN"] == made.run
    assert told[0]["GKR_ATTEMPT"] == "2"


def test_the_command_starts_in_the_code_that_came_with_it() -> None:
    made = plan("east").model_copy(update={"code": "/home/me/work"})
    assert working_folder(made, environment={"GKR_CODE_DIR": "/gkr/code"}) == Path("/gkr/code")
    assert working_folder(made, environment={}) == Path("/home/me/work")
    assert working_folder(plan("east"), environment={}) is None


@pytest.mark.parametrize(
    ("codes", "kind", "words"),
    [
        ((0, 0), "finished", "finished"),
        ((1, -9), "killed", "SIGKILL"),
        ((137, 1), "killed", "SIGKILL"),
        ((0, 3), "user", "the command of node 1 ended with exit 3"),
        ((255, 0), "user", "exit 255"),
    ],
)
def test_only_a_signal_is_somebody_elses_doing(codes: tuple[int, int], kind: str, words: str) -> None:
    ends = [RankEnd(rank=rank, code=code, monotonic=float(rank), reason=None) for rank, code in enumerate(codes)]
    cause = classify_commands(ends)
    assert cause.kind == kind
    assert words in cause.text
