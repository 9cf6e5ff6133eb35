"""The host of long-lived services: known ports, restarts on the same port, and an end that somebody sees."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import ray

from services.hosting import PollResult, ReplicaDeath, ServiceHosts, join_ray, start_services
from services.standing import watch
from spec.errors import UnreachableError
from spec.names import service_resource
from spec.plan import LearnerPlan, ServicePlan
from spec.services import Directory, Replica
from training.processes import free_port

SECONDS = 60.0
ECHO = "tests.builders.echo:Echo"


class Played:
    """Hosts that saw what a test says, one look after the other."""

    def __init__(self, *seen: PollResult) -> None:
        self._seen = list(seen)

    def poll(self, deadline_seconds: float, *, patient: bool = False) -> PollResult:
        assert deadline_seconds > 0
        return self._seen.pop(0)


def seen(*, replicas: int = 0, dead: str = "", failed: str = "") -> PollResult:
    served = [
        Replica(service="judge", kind="evaluate", index=index, endpoint="tcp://10.0.0.1:7200", incarnation=1)
        for index in range(replicas)
    ]
    deaths = [ReplicaDeath("judge", 0, dead, 0.0, 0.0, restarted=True)] if dead else []
    return PollResult(Directory(epoch=1, replicas=served), [], deaths, {"judge-0": failed} if failed else {})


def test_it_goes_on_through_deaths_until_it_is_told_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    told = iter([False, False, True])
    assert watch(Played(seen(), seen(replicas=1), seen(dead="killed")), stopped=lambda _: next(told)) == 0
    assert "judge-0 on tcp://10.0.0.1:7200 serves" in caplog.text
    assert "judge-0 died: killed" in caplog.text


def test_a_replica_that_is_given_up_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    assert watch(Played(seen(), seen(failed="no such manifest")), stopped=lambda _: False) == 1
    assert "given up: judge-0: no such manifest" in caplog.text


@pytest.fixture
def small_ray() -> Generator[None]:
    ray.init(
        "local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
        configure_logging=False, resources={service_resource("echo-0"): 1}, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def hosts(small_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int) -> Generator[ServiceHosts]:
    monkeypatch.setenv("GKR_RUN_DIR", str(tmp_path))
    service = ServicePlan(name="echo-0", kind="encode", replicas=1, cpu=1, memory=2**30, queue_depth=8, max_batch=4)
    learner = LearnerPlan(
        name="shared", cluster="c", region="r", gpu=None, nodes=[], world_size=0, services=[service],
        data_manifest="", checkpoints="",
    )  # fmt: skip
    started = start_services(
        learner, manifest="", cache_dir=str(tmp_path / "cache"), log_dir=str(tmp_path / "logs"),
        classes={"encode": ECHO}, first_port=port,
    )  # fmt: skip
    yield started
    started.close()


@pytest.fixture
def port() -> int:
    return free_port()


def serving(hosts: ServiceHosts, *, after: int) -> Replica:
    """The replica whose incarnation is later than that."""
    limit = time.monotonic() + SECONDS
    while True:
        found = hosts.poll(0.5, patient=True).directory.replicas
        if found and found[0].incarnation > after:
            return found[0]
        assert time.monotonic() < limit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_replica_comes_back_on_its_port(hosts: ServiceHosts, port: int) -> None:
    first = serving(hosts, after=0)
    assert first.endpoint.endswith(f":{port}")
    os.kill(first.pid, signal.SIGKILL)
    second = serving(hosts, after=first.incarnation)
    assert second.endpoint == first.endpoint
    assert second.pid != first.pid


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_port_that_is_still_taken_is_tried_again(hosts: ServiceHosts, port: int) -> None:
    """The predecessor may not be gone yet when its successor listens: the service was given up for that."""
    with socket.create_server((ray.util.get_node_ip_address(), port)):
        limit = time.monotonic() + SECONDS
        deaths: list[ReplicaDeath] = []
        while not deaths:
            assert time.monotonic() < limit
            deaths = hosts.poll(0.5, patient=True).deaths
    assert "cannot listen on" in deaths[0].cause
    assert deaths[0].restarted
    assert serving(hosts, after=0).endpoint.endswith(f":{port}")


def test_a_ray_that_does_not_come_is_said_after_the_deadline() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError, match="within 0 s"):
        join_ray(address, deadline_seconds=0)
