"""The syncer as a pod runs it: store and events in a bucket, nothing of its own folder left after a restart."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gkr.sync_keys import write_keys
from spec.errors import EXIT_REFUSED, EXIT_UNREACHABLE
from spec.events import SyncMerged, read_events
from spec.plan import Plan, ServicePlan
from spec.sync_keys import open_connection
from storage import Bucket
from tests.builders.object_store import ObjectServer, serve_objects
from tests.builders.sync_world import (
    DEADLINE,
    LAYOUT,
    Server,
    make_plan,
    spawn_server,
    start_server,
    together,
    wait_until,
)
from tests.unit.training.sync.conftest import Join
from training.processes import free_port
from training.sync.client import SyncClient


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with serve_objects(tmp_path_factory.mktemp("store")) as one:
        yield one


class Pod:
    """Starts syncers of one run, each in an empty folder, on the same ports."""

    def __init__(self, folder: Path, objects: ObjectServer) -> None:
        self.folder, self.bucket = folder, objects.open()
        self.environment = {**objects.environment, "GKR_RUN_DIR": str(folder / "run")}
        base = make_plan(folder, store=f"{self.bucket.uri}/sync")
        sampler = ServicePlan(
            name="sampler", kind="sample", replicas=1, cpu=1, memory=2**30, queue_depth=1, max_batch=1
        )  # fmt: skip
        learners = [
            one.model_copy(update={"run_uri": self.bucket.uri, "services": [sampler]}) for one in base.learners
        ]  # fmt: skip
        self.plan: Plan = base.model_copy(update={"backend": "kubernetes", "learners": learners})
        write_keys(folder / "keys", plan=self.plan)
        self.ports = [free_port(), free_port()]
        self.servers: list[Server] = []

    def start(self) -> Server:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        server = start_server(
            self.folder,
            self.plan,
            "--until-final",
            control_port=self.ports[0],
            bulk_port=self.ports[1],
            environment=self.environment,
        )
        server.control, server.bulk = (f"127.0.0.1:{port}" for port in self.ports)
        self.servers.append(server)
        return server

    def merges(self) -> list[int]:
        data = b"".join(self.bucket.get(entry.key).data for entry in self.bucket.list("events/syncer"))
        events = read_events(data.decode().splitlines())
        return [one.round for one in events if isinstance(one, SyncMerged)]


@pytest.fixture
def pod(tmp_path: Path, objects: ObjectServer) -> Iterator[Pod]:
    one = Pod(tmp_path, objects)
    yield one
    for server in one.servers:
        if server.process.poll() is None:
            server.kill()


def keys(bucket: Bucket, prefix: str) -> list[str]:
    return [entry.key for entry in bucket.list(prefix)]


def test_a_run_survives_the_loss_of_its_syncers_pod_and_ends_it(pod: Pod, learn: Join) -> None:
    server = pod.start()
    east, west = learn(server, "east", ranks=2), learn(server, "west")
    together(east.join, west.join)
    together(east.round, west.round)
    server.kill()
    again = pod.start()
    together(east.finish, west.finish)
    assert [one.kind for one in east.verdicts] == ["merged"] * 5
    assert east.theta.tobytes() == west.theta.tobytes()
    status = east.clients[0].status()
    assert (status.version, status.final, status.epoch) == (5, True, 2)
    for one in (east, west):
        assert one.registration is not None
        one.clients[0].leave(one.registration.generation)
    # Nobody has evaluated the final model yet: it is still served.
    own = again.keys_of("east")
    assert own is not None
    connection = open_connection("127.0.0.1", pod.ports[1], timeout_seconds=DEADLINE, keys=own)
    connection.request("GET", f"/v1/{pod.plan.run}/models/{status.model_sha256}", headers=own.headers)
    assert hashlib.sha256(connection.getresponse().read()).hexdigest() == status.model_sha256
    connection.close()
    assert again.process.poll() is None
    pod.bucket.put("summary.json", b"{}")
    assert again.process.wait(DEADLINE) == 0
    assert pod.merges() == [1, 2, 3, 4, 5]
    assert len(keys(pod.bucket, "sync/states")) == pod.plan.syncer.config.keep_states  # type: ignore[union-attr]
    assert "sync/HEAD.json" in keys(pod.bucket, "sync")


def test_a_syncer_whose_pod_was_replaced_ends(pod: Pod, learn: Join) -> None:
    first = pod.start()
    east, west = learn(first, "east"), learn(first, "west")
    together(east.join, west.join)
    together(east.round, west.round)
    other = pod.folder / "other"
    other.mkdir()
    shutil.copytree(pod.folder / "keys", other / "keys")
    environment = {**pod.environment, "GKR_RUN_DIR": str(other / "run")}
    second = spawn_server(other, pod.plan, "--control-port", "0", "--bulk-port", "0", environment=environment)
    try:
        assert first.process.wait(DEADLINE) == EXIT_REFUSED
        log = (first.folder / "syncer.log").read_text()
        assert "another syncer has taken over this run (epoch 2, mine is 1)" in log
        wait_until(lambda: (other / "syncer.json").exists())
    finally:
        second.kill()
        second.wait(DEADLINE)


def test_a_bucket_that_is_not_there_ends_the_start_with_one_clear_line(pod: Pod) -> None:
    pod.plan = pod.plan.model_copy(update={"timeouts": pod.plan.timeouts.model_copy(update={"start": 0.5})})
    environment = {**pod.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    process = spawn_server(pod.folder, pod.plan, "--control-port", "0", "--bulk-port", "0", environment=environment)
    assert process.wait(90) == EXIT_UNREACHABLE
    log = (pod.folder / "syncer.log").read_text()
    assert "the object store failed" in log
    assert "Traceback" not in log


def test_an_earlier_version_comes_from_the_bucket(pod: Pod, learn: Join) -> None:
    server = pod.start()
    east, west = learn(server, "east"), learn(server, "west")
    together(east.join, west.join)
    together(east.round, west.round)
    earlier = east.theta.tobytes()
    together(east.round, west.round)
    server.kill()
    again = pod.start()
    own = again.keys_of("east")
    client = SyncClient(again.control, bulk=again.bulk, run=pod.plan.run, learner="east", layout=LAYOUT, keys=own)
    assert client.fetch(1).tobytes() == earlier
    client.close()
