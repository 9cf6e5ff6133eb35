"""A learner of two ranks whose data, checkpoints, shared weights and events are in an object store: as on a cluster,
but for Ray. It is killed, begins again in an empty folder, and comes to an end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gkr.sync_keys import write_keys
from services.prepare.__main__ import prepare
from spec.events import CheckpointSaved, Restored, StepMetrics, read_events
from spec.plan import LearnerPlan, NodePlan, Plan, SyncerPlan
from spec.sync import SyncConfig
from spec.sync_keys import ENVIRONMENT
from spec.train import TrainConfig
from tests.builders.object_store import ObjectServer, environment_of, serve_objects
from tests.builders.sync_world import ROOT, wait_until
from tests.builders.trainer_runs import GATED, allow
from training.context import RuntimeContext
from training.processes import free_port

DEADLINE = 150.0
RANKS = 2
BATCH = 16
TRAIN = TrainConfig.model_validate(
    {
        "samples": 20 * BATCH,
        "batch": BATCH,
        "dtype": "float32",
        "loader_workers": 1,
        "log_every": 1,
        "checkpoint": {"every_steps": 3},
        "model": {"width": 32, "depth": 2, "heads": 2, "conditioning": "class"},
    }
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with serve_objects(tmp_path) as one, environment_of(one):
        yield one


class Run:
    """One syncer and the ranks of one learner, each attempt in a folder of its own, as in new pods."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.ports = [free_port() for _ in range(2)]
        node = NodePlan(name="n0", group="trainer", machine="cpu", ranks=RANKS, cpu=1, memory=2**30, shm=2**20)
        learner = LearnerPlan(
            name="east", cluster="c", region="r", gpu=None, nodes=[node], world_size=RANKS,
            data_manifest=f"{uri}/data/digits/manifest.json", checkpoints=f"{uri}/run/checkpoints/east",
            run_uri=f"{uri}/run",
        )  # fmt: skip
        syncer = SyncerPlan(
            cluster="c", control_port=self.ports[0], bulk_port=self.ports[1], store=f"{uri}/run/sync",
            config=SyncConfig.model_validate({"inner_steps": 5}), target_samples=TRAIN.samples, round_samples=5 * BATCH,
        )  # fmt: skip
        self.plan = Plan(
            experiment="e", run="r1", backend="kubernetes", learners=[learner], train=TRAIN, syncer=syncer
        )  # fmt: skip
        (folder / "plan.json").write_text(self.plan.write_json())

    def syncer(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", GATED, "--plan", str(self.folder / "plan.json"), "--until-final"]
        keys = self.folder / "keys"
        if not keys.exists():
            write_keys(keys, plan=self.plan)
        environment = {
            **os.environ, ENVIRONMENT: str(keys / "run"), "GKR_RUN_DIR": str(self.folder / "syncer"),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self.folder / "syncer.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stderr=log, env=environment)

    def ranks(self, *, attempt: int) -> list[subprocess.Popen[bytes]]:
        node_dir, port = self.folder / f"pod-{attempt}", free_port()
        node_dir.mkdir()
        started: list[subprocess.Popen[bytes]] = []
        for rank in range(RANKS):
            context = RuntimeContext(
                plan=str(self.folder / "plan.json"), learner="east", node="n0", node_dir=str(node_dir), rank=rank,
                local_rank=rank, world_size=RANKS, attempt=attempt, epoch=attempt, master_addr="127.0.0.1",
                master_port=port, syncer_control=f"127.0.0.1:{self.ports[0]}", syncer_bulk=f"127.0.0.1:{self.ports[1]}",
                last_position=0,
            )  # fmt: skip
            environment = {
                **os.environ,
                **context.to_environment(),
                "GKR_RUN_DIR": str(node_dir),
                ENVIRONMENT: str(self.folder / "keys" / "east"),
                "OMP_NUM_THREADS": "1",
            }
            code = "import sys; from training.rank import main; sys.exit(main())"
            with (self.folder / f"rank-{attempt}-{rank}.log").open("ab") as log:
                started.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=log, env=environment))
        return started

    def events(self, attempt: int) -> list[object]:
        path = self.folder / f"pod-{attempt}" / f"events-{attempt}-0.jsonl"
        return list(read_events(path.read_text().splitlines())) if path.exists() else []

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))


def of(kind: type, events: list[object]) -> list[object]:
    return [one for one in events if isinstance(one, kind)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_learner_in_new_pods_goes_on_from_the_bucket(server: ObjectServer, tmp_path: Path) -> None:
    """Six processes that import torch, on a busy machine."""
    uri = server.uri()
    prepare(f"{uri}/data/digits/manifest.json", source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    run = Run(tmp_path, uri)
    with ExitStack() as stack:
        allow(tmp_path, 1)  # the first ranks stand at step 10
        syncer = run.syncer()
        stack.callback(syncer.kill)
        first = run.ranks(attempt=1)
        for one in first:
            stack.callback(one.kill)

        def saved() -> bool:
            assert all(one.poll() is None for one in (*first, syncer)), run.logs()
            return len(of(CheckpointSaved, run.events(1))) >= 2

        wait_until(saved, seconds=DEADLINE)
        for one in first:
            one.kill()
            one.wait(20)
        second = run.ranks(attempt=2)
        for one in second:
            stack.callback(one.kill)
        allow(tmp_path, 10**9)
        assert [one.wait(DEADLINE) for one in second] == [0, 0], run.logs()
        assert syncer.wait(30) == 0, run.logs()
    (restored,) = of(Restored, run.events(2))
    assert isinstance(restored, Restored)
    assert restored.checkpoint.startswith(f"{uri}/run/checkpoints/east/step-")
    assert restored.skipped == []
    assert restored.step >= 6
    steps = [one.step for one in of(StepMetrics, run.events(2)) if isinstance(one, StepMetrics)]
    assert steps[0] == restored.step + 1
    assert steps[-1] == 20
    bucket = server.open(f"{uri}/run")
    assert bucket.folders("checkpoints/east"), "checkpoints are in the bucket"
    assert [entry.key for entry in bucket.list("events/syncer")]
    assert not [
        path for path in tmp_path.rglob("*.safetensors") if "objects" not in path.parts and "syncer" not in path.parts
    ]
