"""Hosting: real Ray actors on a small local Ray. One instance for the file; its start is most of the time here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from services import hosting
from services.client import ServiceClient
from services.directory import write_directory
from services.hosting import PollResult, ReplicaDeath, ServiceHosts, start_services
from services.registry import CLASSES
from services.service import Reply
from spec.events import ServiceStats
from spec.names import service_resource
from spec.plan import LearnerPlan, ServicePlan
from spec.services import ServiceKind
from spec.sync_keys import ENVIRONMENT, TOKEN
from tests.builders.echo import EchoArgs, EchoReply
from tests.builders.pictures import encoded, picture

pytestmark = [
    pytest.mark.slow,
    # Ray leaves files and sockets to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
SECONDS = 60.0
ECHO = "tests.builders.echo:Echo"
KEY = "t" * 64


@pytest.fixture(scope="module")
def small_ray(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """With the keys of a run, as every process of a run has them."""
    keys = tmp_path_factory.mktemp("keys")
    (keys / TOKEN).write_text(KEY)
    os.environ[ENVIRONMENT] = f"{keys}"
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        configure_logging=False,
        resources={service_resource("echo"): 2, service_resource("maker"): 1},
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
    del os.environ[ENVIRONMENT]


def learner(
    *, name: str = "echo", kind: ServiceKind = "encode", replicas: int = 1, shared: list[str] | None = None,
    shared_secret: str = "",
) -> LearnerPlan:  # fmt: skip
    service = ServicePlan(
        name=name,
        kind=kind,
        replicas=replicas,
        cpu=1,
        memory=2**30,
        queue_depth=8,
        queue_bytes=2**20,
        max_batch=4,
        shared_endpoints=shared or [],
        shared_secret=shared_secret,
    )
    return LearnerPlan(
        name="east",
        cluster="local-0",
        region="local",
        gpu=None,
        nodes=[],
        world_size=1,
        services=[service],
        data_manifest="",
        checkpoints="",
    )


class Watched:
    """Replicas that are polled, with the directory kept in a file as the driver does."""

    def __init__(self, hosts: ServiceHosts, path: Path) -> None:
        self.hosts = hosts
        self.path = path
        self.deaths: list[ReplicaDeath] = []
        self.result = self.poll()

    def poll(self) -> PollResult:
        self.result = self.hosts.poll(0.5, patient=True)
        write_directory(self.path, directory=self.result.directory)
        self.deaths += self.result.deaths
        return self.result

    def until_serving(self, replicas: int, *, deaths: int = 0) -> PollResult:
        limit = time.monotonic() + SECONDS
        while len(self.deaths) < deaths or len(self.result.directory.replicas) < replicas:
            assert time.monotonic() < limit, self.result
            self.poll()
        return self.result


@contextmanager
def watched(tmp_path: Path, *, path: str = ECHO, **of_learner: Any) -> Generator[Watched]:
    hosts = start_services(
        learner(**of_learner),
        manifest="",
        cache_dir=str(tmp_path),
        log_dir=str(tmp_path / "logs"),
        classes={**CLASSES, "encode": path},
    )
    try:
        yield Watched(hosts, tmp_path / "directory.json")
    finally:
        hosts.close()


@pytest.mark.usefixtures("small_ray")
def test_a_replica_killed_under_load_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    """Slow: starts Ray. SIGKILL of one of two replicas, and then of its successor, while requests are in flight."""
    ended: list[str] = []
    futures: list[Future[Reply]] = []
    with (
        watched(tmp_path, replicas=2) as service,
        closing(ServiceClient(service.path, service="echo", identity="rank-0")) as client,
    ):
        for deaths in (1, 2):
            before = service.until_serving(2, deaths=deaths - 1).directory
            victim = next(replica for replica in before.replicas if replica.index == 0)
            for number in range(len(futures), len(futures) + 300):
                future = client.submit("echo", EchoArgs(text=str(number)), reply=EchoReply, deadline_seconds=SECONDS)
                future.add_done_callback(lambda done: ended.append(done.result().body.text))
                futures.append(future)
            futures[-250].result(SECONDS)
            os.kill(victim.pid, signal.SIGKILL)
            after = service.until_serving(2, deaths=deaths).directory
            successor = next(replica for replica in after.replicas if replica.index == 0)
            assert successor.incarnation > victim.incarnation
            assert after.epoch > before.epoch
            assert all(replica.sealed for replica in after.replicas)
        texts = [future.result(SECONDS).body.text for future in futures]

        assert texts == [str(number) for number in range(600)]
        assert len(ended) >= 599  # the last callback may still be running
        assert len(set(ended)) == len(ended)
        assert [(death.service, death.index, death.restarted) for death in service.deaths] == [("echo", 0, True)] * 2
        assert "killed or crashed" in service.deaths[0].cause
        stats = service.poll().stats
        assert {row["replica"] for row in stats} == {0, 1}
        events = [ServiceStats(time=0.0, source="driver/east", **row) for row in stats]
        assert {(one.grant, one.grant_bytes) for one in events} == {(8, 2**20)}
        assert {name for one in events for name in one.by_priority} == {"blocking"}
        assert "serves on tcp://" in (tmp_path / "logs" / "service-echo-0.log").read_text()


@pytest.mark.usefixtures("small_ray")
def test_a_replica_that_hangs_in_one_batch_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: shares the Ray of this file. Busy is healthy until the longest time that a batch may take."""
    with (
        watched(tmp_path, path="tests.builders.echo:Hanging") as service,
        closing(ServiceClient(service.path, service="echo", identity="rank-0")) as client,
    ):
        service.until_serving(1)
        future = client.submit("echo", EchoArgs(text="hang"), reply=EchoReply, deadline_seconds=SECONDS)
        assert service.poll().stats
        assert not service.deaths
        monkeypatch.setattr(hosting, "LONGEST_BATCH_SECONDS", 0.2)
        service.until_serving(0, deaths=1)
        future.cancel()

    assert "one batch is being computed for" in service.deaths[0].cause


@pytest.mark.usefixtures("small_ray")
def test_a_replica_that_dies_at_every_start_is_given_up_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: shares the Ray of this file. One restart instead of three, because each takes seconds."""
    monkeypatch.setattr(hosting, "MAX_FRUITLESS_STARTS", 1)
    with watched(tmp_path, path="tests.builders.echo:Dying") as service:
        service.until_serving(0, deaths=2)

        assert [death.restarted for death in service.deaths] == [True, False]
        assert not service.poll().starting
        assert service.deaths[-1].cause == "RuntimeError: cannot load"
        assert "service-echo-0.log" in service.result.failed["echo-0"]


@pytest.mark.usefixtures("small_ray")
def test_a_configuration_that_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    """Slow: shares the Ray of this file."""
    with watched(tmp_path, path="tests.builders.echo:Misconfigured") as service:
        service.until_serving(0, deaths=1)

        assert [death.restarted for death in service.deaths] == [False]
        assert "the weights are not there" in service.result.failed["echo-0"]


@pytest.mark.usefixtures("small_ray")
def test_a_replica_of_the_platform_does_not_serve_without_the_platforms_token(tmp_path: Path) -> None:
    """Slow: shares the Ray of this file, whose processes have a run's keys only."""
    with watched(tmp_path, shared_secret="gkr-services") as service:
        service.until_serving(0, deaths=1)
        assert [death.restarted for death in service.deaths] == [False]
        assert "the token in Secret gkr-services, which is not here" in service.result.failed["echo-0"]


@pytest.mark.usefixtures("small_ray")
def test_a_dataset_is_prepared_by_a_replica_and_the_command_that_asks_has_the_runs_keys(tmp_path: Path) -> None:
    """Slow: shares the Ray of this file. The command is told nothing but where the run's directory file is."""
    source = tmp_path / "images"
    source.mkdir()
    for number in range(12):
        (source / f"{number}.png").write_bytes(encoded(picture(number)))
        (source / f"{number}.txt").write_text(f"picture {number}")
    run = tmp_path / "run" / "state"
    with watched(run, name="maker", kind="prepare") as service:
        replica = service.until_serving(1).directory.replicas[0]
        assert replica.sealed
        directory, keys = run / "services-east.json", run / "keys" / "east"
        write_directory(directory, directory=service.result.directory)
        keys.mkdir(parents=True)
        (keys / TOKEN).write_text(KEY)
        command = [sys.executable, "-m", "gkr", "data", "prepare", f"{source}", "--to", f"{tmp_path / 'made'}"]
        command += ["--services", f"{directory}", "--by", "maker", "-o", "json"]
        environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["done"], report["train"] + report["test"], report["captions"]) == (True, 12, 12)
        [told] = service.poll().stats
        assert told["requests"] >= 1
        with urllib.request.urlopen(replica.metrics, timeout=SECONDS) as answer:
            assert 'gkr_service_requests_total{class="blocking",service="maker"}' in answer.read().decode()


def test_shared_replicas_are_in_the_directory_and_nothing_is_started(tmp_path: Path) -> None:
    hosts = start_services(
        learner(shared=["tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"]),
        manifest="",
        cache_dir=str(tmp_path),
        log_dir=str(tmp_path),
    )

    endpoints = [replica.endpoint for replica in hosts.poll(0).directory.replicas]

    assert endpoints == ["tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"]
    assert list(tmp_path.iterdir()) == []
    hosts.close()
