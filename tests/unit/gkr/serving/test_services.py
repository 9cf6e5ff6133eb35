"""`gkr services`: what the events of a run tell of its replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gkr.commands.services import command
from gkr.serving.lines import lines
from gkr.serving.told import ReplicaNow, told_replicas
from spec.events import Event, Recovery, ServiceStats
from spec.plan import Plan, ServicePlan
from tests.builders import local_runs
from tests.builders.synthetic_run import write_synthetic_run


def plan_with(*, replicas: int = 1, shared: tuple[str, ...] = ()) -> Plan:
    service = ServicePlan(
        name="encoder", kind="encode", replicas=replicas, cpu=1.0, memory=2**30, queue_depth=8, max_batch=64,
        shared_endpoints=list(shared),
    )  # fmt: skip
    plan = local_runs.plan("east")
    return plan.model_copy(update={"learners": [plan.learners[0].model_copy(update={"services": [service]})]})


def stats(*, time: float, replica: int = 0, **fields: Any) -> Event:
    numbers: dict[str, Any] = {"requests": 10, "errors": 0, "p50_ms": 1.0, "p99_ms": 2.0, "queued": 0} | fields
    return ServiceStats(
        time=time, source="driver/east", learner="east", service="encoder", replica=replica, incarnation=1, **numbers
    )


def death(*, time: float, action: str = "restarted", replica: int = 0) -> Event:
    return Recovery(
        time=time, source="driver/east", learner="east", what=f"service encoder-{replica}", cause="SIGKILL",
        action=action, detected_seconds=0.1,
    )  # fmt: skip


def states(plan: Plan, *events: Event) -> list[tuple[str, int]]:
    return [(one.state, one.restarts) for one in told_replicas(plan, events)]


def test_a_replica_is_starting_until_it_speaks_and_restarting_until_its_successor_does() -> None:
    plan = plan_with()
    first, killed, second = stats(time=1.0), death(time=2.0), stats(time=3.0)
    assert states(plan) == [("starting", 0)]
    assert states(plan, first) == [("serving", 0)]
    assert states(plan, first, killed) == [("restarting", 1)]
    assert states(plan, first, killed, second) == [("serving", 1)]
    assert states(plan, first, killed, death(time=4.0, action="given up")) == [("given up", 1)]


def test_the_death_of_one_replica_is_not_the_others() -> None:
    plan = plan_with(replicas=2)
    events = [stats(time=1.0), stats(time=1.0, replica=1), death(time=2.0, replica=1)]
    assert states(plan, *events) == [("serving", 0), ("restarting", 1)]


def test_shared_replicas_are_named_by_their_addresses() -> None:
    (one,) = told_replicas(plan_with(shared=("tcp://a:1", "tcp://b:2")), [])
    assert (one.state, one.cause, one.stats) == ("shared", "tcp://a:1, tcp://b:2", None)
    assert "shared: tcp://a:1, tcp://b:2" in "\n".join(lines("run", "running", [one], now=1.0))


def test_the_text_shows_credit_classes_and_who_waits_most() -> None:
    told = stats(
        time=100.0,
        clients=2,
        grant=8,
        grant_bytes=64 * 2**20,
        queued_bytes=3 * 2**20,
        weights="0123456789abcdef",
        computing_seconds=75.0,
        by_priority={"prefetch": {"requests": 9, "queued": 4, "p50_ms": 0.5, "p99_ms": 1500.0}},
        by_rank={"east/rank-1": {"requests": 3, "outstanding": 7, "outstanding_bytes": 2048}, "east/rank-0": {}},
    )
    text = "\n".join(lines("run-1", "running", told_replicas(plan_with(), [told]), now=103.0))
    for words in (
        "run       run-1 (running)", "serving, one batch for 1m15s", "8 / 64Mi", "3Mi", "0123456789ab", "3s ago",
        "prefetch", "1.5s", "east/rank-1", "7 of 8", "2Ki",
    ):  # fmt: skip
        assert words in text, words
    assert "rank-0" not in text


def test_many_waiting_ranks_are_cut_and_counted() -> None:
    ranks = {f"east/rank-{n}": {"outstanding": n} for n in range(1, 31)}
    replicas = told_replicas(plan_with(), [stats(time=1.0, grant=64, by_rank=ranks)])
    text = "\n".join(lines("run-1", "running", replicas, now=2.0))
    assert "east/rank-30" in text
    assert "east/rank-1 " not in text
    assert "14 more ranks wait" in text


def test_what_broke_is_said_first() -> None:
    found = lines("run-1", "running", told_replicas(plan_with(), [stats(time=1.0), death(time=2.0)]), now=3.0)
    assert found[1] == "encoder-0 of east: restarting after SIGKILL"


def test_a_run_without_services_says_so() -> None:
    nothing: list[ReplicaNow] = []
    assert "the run has no services" in lines("run-1", "running", nothing, now=1.0)


@pytest.mark.parametrize("watch", [[], ["--watch"]])
def test_the_command_shows_a_run_that_ended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: list[str]
) -> None:
    monkeypatch.setenv("GKR_RUNS", str(tmp_path))
    folder = write_synthetic_run(tmp_path)
    shown = CliRunner().invoke(command, [folder.name, *watch])
    assert shown.exit_code == 0, shown.output
    assert "encoder-0" in shown.output
    told = CliRunner().invoke(command, [folder.name, *watch, "-o", "json"])
    document = json.loads(told.output)
    assert document["run_state"] == "succeeded"
    assert {one["service"] for one in document["replicas"]} == {"encoder", "sampler", "judge"}
    assert document["replicas"][0]["stats"]["by_priority"]["blocking"]["requests"] > 0


def test_once_the_run_is_over_no_replica_serves() -> None:
    plan = plan_with(replicas=2)
    told = told_replicas(plan, [stats(time=1.0)], over=True)
    assert [one.state for one in told] == ["ended", "ended"]


def test_each_class_stands_with_its_learner_and_without_requests_there_is_no_latency() -> None:
    classes = {"blocking": {"requests": 9, "queued": 0, "p50_ms": 2.0, "p99_ms": 3.0}, "prefetch": {"requests": 0}}
    found = lines("run", "running", told_replicas(plan_with(), [stats(time=1.0, by_priority=classes)]), now=2.0)
    rows = [line.split() for line in found[-1].splitlines()]
    assert rows[0][:3] == ["LEARNER", "REPLICA", "CLASS"]
    assert rows[1] == ["east", "encoder-0", "blocking", "9", "0", "2ms", "3ms"]
    assert rows[2] == ["east", "encoder-0", "prefetch", "0", "0", "-", "-"]
