"""Fixtures that clean up the real processes of the sync tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spec.plan import Plan
from tests.builders.sync_world import Server, ToyLearner, make_plan, start_server

Serve = Callable[..., Server]
Join = Callable[..., ToyLearner]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers on this test's folder and ends them afterwards."""
    servers: list[Server] = []

    def start(plan: Plan | None = None, *, again: Server | None = None) -> Server:
        servers.append(again.restart() if again else start_server(tmp_path, plan or make_plan(tmp_path)))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def learn() -> Iterator[Join]:
    """Makes learners of a server and closes them afterwards."""
    learners: list[ToyLearner] = []

    def make(server: Server, name: str, *, ranks: int = 1) -> ToyLearner:
        keys = server.keys_of(name)
        learners.append(ToyLearner(server.plan, name, server.control, server.bulk, ranks=ranks, keys=keys))
        return learners[-1]

    yield make
    for learner in learners:
        with suppress(OSError):
            learner.close()
