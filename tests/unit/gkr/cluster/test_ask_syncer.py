"""Asking a syncer on a cluster: the pod is found by the API server's answer, the question is asked inside it.

The exec of the API server needs a kubelet behind it; here a DOUBLE of that one request runs the command as a process of
this machine with the pod's environment. What it asks is the real syncer, with the real keys.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightkube import Client
from lightkube.types import ExecResponse

from gkr.cluster.ask_syncer import ask_cluster_syncer
from gkr.cluster.places import LearnerPlace, Places, write_places
from gkr.runs import Run
from gkr.sync_keys import SYNCER, write_keys
from manifests.labels import ROLE, RUN
from spec.errors import NotFoundError, RefusedError
from spec.sync_keys import ENVIRONMENT
from spec.sync_status import SyncStatus
from tests.builders import cluster_runs
from tests.builders.api_double import ApiDouble, serving
from tests.builders.sync_world import DEADLINE, ROOT, make_plan, start_server


@pytest.fixture
def double() -> Iterator[ApiDouble]:
    with serving(ApiDouble()) as found:
        yield found


@pytest.fixture
def run(double: ApiDouble, tmp_path: Path) -> Run:
    """A run whose syncer's place is the double."""
    folder = tmp_path / "runs" / "toy" / "r1"
    (folder / "state").mkdir(parents=True)
    entry = cluster_runs.entry(double, tmp_path)
    place = LearnerPlace("", entry.name, "gkr-0", "toy-syncer")
    write_places(folder, Places("toy", "r1", (), {entry.name: entry}, syncer=place))
    return Run("toy", "r1", folder, created=0.0)


def put_pod(double: ApiDouble, *, role: str = "syncer", phase: str = "Running") -> None:
    double.put(
        "Pod", f"toy-{role}-x", namespace="gkr-0", metadata={"labels": {RUN: "r1", ROLE: role}},
        spec={"containers": [{"name": "syncer"}]}, status={"phase": phase},
    )  # fmt: skip


def stand_in_for_exec(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> list[tuple[str, ...]]:
    """Let execs run here; who was asked for."""
    asked: list[tuple[str, ...]] = []

    def run_here(
        self: Client, name: str, *, namespace: str, container: str, command: Sequence[str], **rest: Any
    ) -> ExecResponse:
        del self, rest
        asked.append((namespace, name, container))
        words = [sys.executable if word == "python" else word for word in command]
        environ = {**os.environ, **environment}
        done = subprocess.run(
            words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        return ExecResponse(stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode)

    monkeypatch.setattr(Client, "exec", run_here)
    return asked


def test_the_syncer_is_asked_inside_its_pod_with_the_keys_that_lie_there(
    double: ApiDouble, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path)
    write_keys(tmp_path / "keys", plan=plan)
    put_pod(double)
    put_pod(double, role="trainer")
    pod = {"GKR_RUN_DIR": f"{tmp_path}", "GKR_PLAN": f"{tmp_path / 'plan.json'}"}
    asked = stand_in_for_exec(monkeypatch, {**pod, ENVIRONMENT: f"{tmp_path / 'keys' / SYNCER}"})
    server = start_server(tmp_path, plan)
    try:
        status = SyncStatus.read_json(ask_cluster_syncer(run, path="status"))
    finally:
        server.kill()
    assert (status.run, status.state) == ("r1", "SEEDING")
    assert asked == [("gkr-0", "toy-syncer-x", "syncer")]
    (tmp_path / "syncer.json").unlink()
    with pytest.raises(RefusedError, match=r"pod toy-syncer-x cannot ask its syncer: .*does not serve yet"):
        ask_cluster_syncer(run, path="status")


def test_without_a_running_pod_the_reason_says_so(double: ApiDouble, run: Run) -> None:
    put_pod(double, role="trainer")
    with pytest.raises(NotFoundError, match="has no pod with role syncer"):
        ask_cluster_syncer(run, path="status")
    put_pod(double, phase="Pending")
    with pytest.raises(RefusedError, match="is not running: toy-syncer-x"):
        ask_cluster_syncer(run, path="status")
