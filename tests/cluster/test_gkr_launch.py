"""Launching and cancelling on a real cluster: KUBECONFIG if given, else the bed if it is up.

Small `run:` experiments only: what a run does inside its pods is tested elsewhere.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from gkr.cluster.connection import Connection, connect
from gkr.cluster.registry import read_registry
from gkr.main import main
from gkr.runs import find_run, read_state
from spec.errors import EXIT_CANCELLED, EXIT_OK, EXIT_REFUSED

NAME = "real"
WAIT_SECONDS = 120.0
SLEEPER = """
version: 1
name: sleeper
groups:
  - {name: trainer, nodes: 1, resources: {cpu: 100m, memory: 512Mi, shm: 64Mi}}
run: sleep 3600
timeouts: {grace: 5s}
"""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kubeconfig: Path) -> Path:
    """A folder with the cluster added and the experiment in it."""
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path / 'gkr'}")
    monkeypatch.setenv("GKR_RUNS", f"{tmp_path / 'runs'}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kubeconfig").write_bytes(kubeconfig.read_bytes())
    (tmp_path / "sleeper.yaml").write_text(SLEEPER)
    assert main(["clusters", "add", NAME, "--kubeconfig", f"{tmp_path / 'kubeconfig'}"]) == EXIT_OK
    return tmp_path


@pytest.fixture
def connection(place: Path) -> Iterator[Connection]:
    del place
    with closing(connect(read_registry().entries[NAME])) as found:
        yield found


def _launch(*more: str) -> str:
    assert main(["launch", "sleeper.yaml", "--cluster", NAME, "-d", *more]) == EXIT_OK
    return find_run(None).name


def _job(connection: Connection, run: str) -> dict[str, Any]:
    (job,) = connection.list("RayJob", namespace="*", labels={"gkr/run": run})
    return job


def _wait(what: str, done: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not done():
        assert time.monotonic() < until, f"no {what} within {WAIT_SECONDS:g} s"
        time.sleep(0.5)


def _left(connection: Connection, run: str) -> list[str]:
    kinds = ("RayJob", "RayCluster", "Pod", "Job", "ConfigMap", "Secret", "Service", "ServiceAccount", "NetworkPolicy")
    found = [one for kind in kinds for one in connection.list(kind, namespace="*", labels={"gkr/run": run})]
    suffix = run.rpartition("-")[2]
    found += [one for one in connection.list("Workload", namespace="*") if suffix in one["metadata"]["name"]]
    return [f"{one.get('kind')} {one['metadata']['name']}" for one in found]


def _cancel(connection: Connection, run: str) -> None:
    assert main(["cancel", run]) == EXIT_OK
    assert _left(connection, run) == []
    state = read_state(find_run(run).path)
    assert (state.status, state.exit_code) == ("cancelled", EXIT_CANCELLED)


def test_cancel_at_once(connection: Connection) -> None:
    _cancel(connection, _launch())


def test_cancel_while_it_waits_in_the_queue(connection: Connection) -> None:
    """Held by Kueue's own switch, which needs no full cluster."""
    run = _launch()
    job = _job(connection, run)

    def workload() -> dict[str, Any] | None:
        uid = job["metadata"]["uid"]
        owned = [
            one
            for one in connection.list("Workload", namespace=job["metadata"]["namespace"])
            if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", []))
        ]
        return owned[0] if owned else None

    _wait("Workload", lambda: workload() is not None)
    found = workload()
    assert found is not None
    namespace = job["metadata"]["namespace"]
    connection.patch("Workload", found["metadata"]["name"], {"spec": {"active": False}}, namespace=namespace)
    _wait("suspended job", lambda: _job(connection, run)["spec"].get("suspend") is True)
    _cancel(connection, run)


def test_cancel_while_its_pods_run_and_after_the_context_was_switched(connection: Connection, place: Path) -> None:
    run = _launch()
    _wait("pod", lambda: bool(connection.list("Pod", namespace="*", labels={"gkr/run": run})))
    document = yaml.safe_load((place / "kubeconfig").read_text())
    document["current-context"] = "another"
    document["contexts"].append({"name": "another", "context": {"cluster": "nowhere", "user": "nobody"}})
    document["clusters"].append({"name": "nowhere", "cluster": {"server": "https://127.0.0.1:9"}})
    document["users"].append({"name": "nobody", "user": {}})
    (place / "kubeconfig").write_text(yaml.safe_dump(document))
    _cancel(connection, run)


def test_cancel_of_a_run_without_its_image(connection: Connection) -> None:
    run = _launch("--set", "image=localhost/no-such-image:1")
    _wait("pod", lambda: bool(connection.list("Pod", namespace="*", labels={"gkr/run": run})))
    _cancel(connection, run)


def test_cancel_of_what_somebody_half_removed(connection: Connection) -> None:
    run = _launch()
    job = _job(connection, run)["metadata"]
    connection.delete("RayJob", job["name"], namespace=job["namespace"])
    _cancel(connection, run)


def test_run_is_found_by_somebody_without_its_folder(
    connection: Connection, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _launch()
    monkeypatch.setenv("GKR_RUNS", f"{place / 'colleague'}")
    capsys.readouterr()
    assert main(["ps", "-o", "json"]) == EXIT_OK
    (row,) = [one for one in json.loads(capsys.readouterr().out) if one["run"] == run]
    assert (row["experiment"], row["path"]) == ("sleeper", "")
    _cancel(connection, run)


def test_rendered_objects_pipe_into_kubectl(place: Path) -> None:
    from tools.binaries import binary

    rendered = subprocess.run(
        [sys.executable, "-m", "gkr", "render", "sleeper.yaml", "--cluster", NAME],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}"},
        cwd=place,
        capture_output=True,
        check=True,
        timeout=60,
    )
    command = [f"{binary('kubectl')}", f"--kubeconfig={place / 'kubeconfig'}", "apply", "--dry-run=server", "-f", "-"]
    applied = subprocess.run(command, input=rendered.stdout, capture_output=True, check=False, timeout=60)
    assert applied.returncode == 0, applied.stderr.decode()
    assert b"rayjob" in applied.stdout


def test_caller_without_rights_is_told_all_of_them_before_anything_is_created(
    connection: Connection, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service account that may only read, with a real token."""
    name, namespace = f"reader-{os.getpid()}", "gkr-0"
    connection.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}})
    annotations = {"kubernetes.io/service-account.name": name}
    metadata = {"name": name, "namespace": namespace, "annotations": annotations}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token", "metadata": metadata}
    connection.apply(secret)
    try:
        _wait("token", lambda: "token" in (connection.get("Secret", name, namespace=namespace).get("data") or {}))
        token = base64.b64decode(connection.get("Secret", name, namespace=namespace)["data"]["token"]).decode()
        document = yaml.safe_load((place / "kubeconfig").read_text())
        document["users"] = [{"name": one["name"], "user": {"token": token}} for one in document["users"]]
        (place / "kubeconfig").write_text(yaml.safe_dump(document))
        assert main(["launch", "sleeper.yaml", "--cluster", NAME, "-d"]) == EXIT_REFUSED
        error = capsys.readouterr().err
        assert "you may not, in namespace gkr-0: create" in error
        assert "create pods/exec" in error
        assert "get pods/log" in error
        assert not (place / "runs").exists()
    finally:
        connection.delete("Secret", name, namespace=namespace)
        connection.delete("ServiceAccount", name, namespace=namespace)
