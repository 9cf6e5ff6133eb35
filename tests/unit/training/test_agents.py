"""The agents of a learner as its driver reaches them: real Ray actors on a small local Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from spec.names import group_resource
from tests.builders.sync_world import make_plan, wait_until
from training import agents
from training.agents import AgentLostError, Agents
from training.context import RuntimeContext

pytestmark = [
    pytest.mark.slow,
    # Ray leaves files and sockets to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    """One agent, of a command: no zygote has to import torch."""
    plan = make_plan(tmp_path, learners=["east"]).model_copy(update={"run_script": "sleep 600"})
    (tmp_path / "plan.json").write_text(plan.write_json())
    monkeypatch.setenv("GKR_RUN_DIR", f"{tmp_path}")
    monkeypatch.setenv("GKR_PLAN", f"{tmp_path / 'plan.json'}")
    ray.init(
        "local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
        configure_logging=False, resources={group_resource("trainer"): 1}, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    found = Agents(plan, learner=plan.learners[0])
    found.start("node-0")
    try:
        wait_until(lambda: found.ready("node-0"), seconds=90)
        yield found
    finally:
        found.close()
        ray.shutdown()


def test_an_agent_that_hangs_when_an_attempt_starts_is_lost_like_one_that_hangs_later(
    one: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is cut off just then is replaced; the run does not end."""
    monkeypatch.setattr(agents, "CALL_DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr(agents, "POLL_DEADLINE_SECONDS", 1.0)
    context = RuntimeContext(
        plan="", learner="east", node="", node_dir="", rank=0, local_rank=0, world_size=1, attempt=1, epoch=1,
        master_addr="", master_port=0, syncer_control="", syncer_bulk="", last_position=0,
    )  # fmt: skip
    os.kill(one.places()["node-0"].pid, signal.SIGSTOP)
    with pytest.raises(AgentLostError, match="no answer within 1 s") as lost:
        one.spawn(context, ranks={"node-0": {0: 0}})
    assert lost.value.node == "node-0"
