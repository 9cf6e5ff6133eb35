"""A node with its real zygote: forks, watches and fences; nothing survives it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from spec.errors import GkrError
from training.node import Node, Snapshot

SECONDS = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(folder=tmp_path / "node-0")
    made.warm()
    yield made
    made.close()


def until(node: Node, holds: Callable[[Snapshot], bool]) -> Snapshot:
    deadline, tick = time.monotonic() + SECONDS, threading.Event()
    while True:
        snapshot = node.poll()
        if holds(snapshot):
            return snapshot
        assert time.monotonic() < deadline, snapshot
        tick.wait(0.02)


def test_a_zygote_forks_watches_fences_and_ends(node: Node, tmp_path: Path) -> None:
    """One test, because a zygote imports torch: seconds."""
    log = str(tmp_path / "rank-0.log")
    # A rank without its environment ends at once: enough to see the whole way of an exit.
    job = {"rank-0": ("rank", {"GKR_RANK": "0"}, log)}
    node.spawn(job, epoch=1)
    snapshot = until(node, lambda seen: bool(seen.exits))
    assert [(one.job, one.code) for one in snapshot.exits] == [("rank-0", 70)]
    assert "not started by an agent" in Path(log).read_text()

    with pytest.raises(GkrError, match="epoch 1 is not newer than 1"):
        node.spawn(job, epoch=1)

    assert node.run_once(
        "two-steps", call="two_steps", environment={}, log=tmp_path / "two.log", deadline_seconds=SECONDS
    )  # not asked anything: a failure, but an answered one

    zygote = node.zygote_pid
    os.kill(zygote, signal.SIGKILL)
    until(node, lambda _: not psutil.pid_exists(zygote))
    node.spawn(job, epoch=2)
    snapshot = until(node, lambda seen: bool(seen.exits))
    assert snapshot.epoch == 2
    assert node.zygote_pid != zygote

    last = node.zygote_pid
    node.close()
    assert not psutil.pid_exists(last)


def test_lines_that_another_agent_handed_on_are_not_handed_on_again(tmp_path: Path) -> None:
    folder = tmp_path / "node-0"
    folder.mkdir()
    (folder / "events-1-0.jsonl").write_text("of the agent before\n")
    made = Node(folder=folder)
    made._first_epoch = 2
    (folder / "events-2-0.jsonl").write_text("ours\nhalf a li")
    assert made.poll().events == ["ours"]
    with (folder / "events-2-0.jsonl").open("a") as file:
        file.write("ne\n")
    assert made.poll().events == ["half a line"]
