"""Services under load in real pods; the run's own command is the load (`tests.builders.service_load`).

A service of two replicas, sealed with the run's keys, loses them one after the other, in both ways that happen: the
process alone is killed, and the whole pod goes. Nothing is lost, nothing doubled. And a run asks the platform's service
in another namespace, with the platform's token.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gkr.cluster.buckets import run_bucket
from gkr.cluster.connection import Connection
from gkr.cluster.joining import refresh_known
from gkr.main import main
from infra.facts import KEY, NAME, NAMESPACE
from manifests.names import METRICS_PORT
from manifests.shared import SharedServices, endpoints, shared_objects
from spec.errors import EXIT_OK
from spec.events import Recovery, ServiceStats
from spec.facts import ClusterFacts
from spec.plan import Plan
from spec.services import ServiceConfig
from tests.builders.cluster_experiments import Look, delete_pod, kill_process, launch
from tests.builders.service_load import STOP

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = f"""
version: 1
name: failover
groups:
  - {{name: load, nodes: 1, resources: {{cpu: 500m, memory: 1Gi, shm: 128Mi}}}}
services:
  judge: {{kind: evaluate, replicas: 2, resources: {{cpu: 500m, memory: 1Gi}}}}
run: PYTHONPATH={ROOT} python -m tests.builders.service_load
timeouts: {{grace: 5s}}
"""
"""The bed mounts the repository where it is here."""
REPLICAS = 2
SHARED_EXPERIMENT = EXPERIMENT.replace("replicas: 2, resources: {cpu: 500m, memory: 1Gi}", "shared: true").replace(
    "name: failover", "name: asks"
)
TOKEN_SECRET = "gkr-services"
START_SECONDS = 240.0
BACK_SECONDS = 120.0
END_SECONDS = 120.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0 or bool(os.environ.get("KUBECONFIG")), reason="needs the bed's own image"),
]


class Replicas:
    """What the run's events say of its replicas."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def serving(self) -> bool:
        """Every replica has answered requests since the last one died."""
        died = max((one.time for one in self._look.events if isinstance(one, Recovery)), default=0.0)
        answered: dict[int, set[int]] = defaultdict(set)
        for one in self._look.events:
            if isinstance(one, ServiceStats) and one.time > died and one.requests:
                answered[one.replica].add(one.incarnation)
        return len(answered) == REPLICAS

    def deaths(self) -> list[Recovery]:
        return [one for one in self._look.events if isinstance(one, Recovery) and one.what.startswith("service judge-")]

    def await_successor(self, count: int) -> None:
        """Until so many have died, and all serve again."""
        self._look.until(
            f"replica after death {count}", lambda _: len(self.deaths()) >= count and self.serving(),
            seconds=BACK_SECONDS,
        )  # fmt: skip


@pytest.fixture
def platform(connection: Connection) -> Iterator[None]:
    """The platform's evaluation service, declared as its stack declares it, and the facts that say where it is."""
    found = connection.get("ConfigMap", NAME, namespace=NAMESPACE)
    facts = ClusterFacts.model_validate_json(found["data"][KEY])
    shared = SharedServices(
        cluster=facts.name, region=facts.region, namespace=NAMESPACE, image=facts.site.image, bucket=facts.bucket,
        services={"scores": ServiceConfig.model_validate({"kind": "evaluate", "resources": {"cpu": 0.5}})},
        site=facts.site, first_port=7200, head_cores=0.5, head_memory=2 * 2**30, token_secret=TOKEN_SECRET,
    )  # fmt: skip
    token = {"token": secrets.token_hex(32)}
    made = [_secret(TOKEN_SECRET, namespace=one, values=token) for one in (NAMESPACE, *facts.namespaces)]
    bucket = connection.get("Secret", facts.site.bucket_secret, namespace=facts.namespaces[0])["data"]
    keys = {key: base64.b64decode(value).decode() for key, value in bucket.items()}
    made += [_secret(facts.site.bucket_secret, namespace=NAMESPACE, values=keys), *shared_objects(shared)]
    told = facts.model_copy(update={"services": endpoints(shared)})
    try:
        for one in made:
            connection.apply(one)
        connection.patch("ConfigMap", NAME, {"data": {KEY: told.write_json()}}, namespace=NAMESPACE)
        refresh_known(["bed"])
        yield
    finally:
        connection.patch("ConfigMap", NAME, {"data": {KEY: found["data"][KEY]}}, namespace=NAMESPACE)
        for one in reversed(made):
            connection.delete(one["kind"], one["metadata"]["name"], namespace=one["metadata"]["namespace"])


def _secret(name: str, *, namespace: str, values: dict[str, str]) -> dict[str, Any]:
    own = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": own, "stringData": values}


@pytest.mark.usefixtures("platform")
def test_a_run_asks_the_platforms_service_with_the_platforms_token(
    place: Path, connection: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a name of its own: the platform calls it otherwise."""
    (place / "asks.yaml").write_text(SHARED_EXPERIMENT)
    run = launch(place / "asks.yaml", clusters="bed")
    try:
        plan = Plan.read_json((run.path / "plan.json").read_bytes())
        run_bucket(connection, learner=plan.home).put(STOP, b"")  # a few requests are enough
        Look(run).summary(seconds=START_SECONDS)
        told = _load(run.name, capsys)
        assert [(one["sealed"], one["shared"]) for one in told["replicas"]] == [(True, True)]
        assert told["errors"] == []
        assert told["answered"] == told["sent"] == 2 * told["counted"] > 0
        assert told["parts"] == told["counted"]
    finally:
        assert main(["cancel", run.name, "--now"]) == EXIT_OK


def _load(run: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the clients saw, from the log of the run's command."""
    capsys.readouterr()
    assert main(["logs", run, "--all"]) == EXIT_OK
    found = [line.partition("LOAD ")[2] for line in capsys.readouterr().out.splitlines() if "LOAD {" in line]
    assert len(found) == 1
    return json.loads(found[0])


def test_replicas_killed_under_load_lose_nothing_and_double_nothing(
    place: Path, connection: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "failover.yaml").write_text(EXPERIMENT)
    run = launch(place / "failover.yaml", clusters="bed")
    try:
        look = Look(run)
        replicas = Replicas(look)
        look.until("load on both replicas", lambda _: replicas.serving(), seconds=START_SECONDS)
        kill_process(connection, run=run, role="service", command="ray::_ReplicaActor")
        replicas.await_successor(1)
        delete_pod(connection, run=run, role="service")
        replicas.await_successor(2)
        kill_process(connection, run=run, role="service", command="ray::_ReplicaActor")
        replicas.await_successor(3)
        plan = Plan.read_json((run.path / "plan.json").read_bytes())
        run_bucket(connection, learner=plan.home).put(STOP, b"")
        summary = look.summary(seconds=END_SECONDS)

        told = _load(run.name, capsys)
        sys.stdout.write(f"{told}\n")  # `-rP` shows the longest gap
        assert told["errors"] == []
        assert told["answered"] == told["sent"] == 2 * told["counted"] > 0, "every request was answered, once"
        assert told["scores"] == 1, "the same pictures have the same score, whichever replica answers"
        assert told["applied"] + told["repeated"] == told["counted"]
        assert told["parts"] == told["counted"], "none lost, none counted twice"
        assert told["samples"] == told["counted"] * told["images_per_part"]
        assert [one["sealed"] for one in told["replicas"]] == [True] * REPLICAS
        assert all(one["metrics"].endswith(f":{METRICS_PORT}/metrics") for one in told["replicas"])
        assert all(one["computed"] > 0 for one in told["replicas"])
        deaths = replicas.deaths()
        assert [one.action for one in deaths] == ["restarted"] * 3
        assert summary.services["judge"].requests > 0
        assert len(summary.recoveries) == 3
    finally:
        assert main(["cancel", run.name, "--now"]) == EXIT_OK
