"""All checks of a node end in time, whatever a collector does, and read as one clear error when they fail."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.prepare.__main__ import prepare
from spec.errors import GkrError, NotFoundError
from spec.events import Check
from spec.plan import LearnerPlan, NodePlan, Plan
from spec.train import CheckpointConfig, LanguageModelConfig, ModelConfig, TrainConfig
from storage.cache import Cache
from tests.builders.sync_world import wait_until
from training.models.families import make_network
from training.preflight import PreflightRequest, check_node, job, refusal, run_host_checks
from training.preflight.measurements import Store, TwoSteps
from training.preflight.request import checkpoint_bytes, parameter_count
from training.preflight.runner import Probe, Running, run_two_steps
from training.preflight.two_steps_job import answer, ask, read_question, write_answer
from training.preflight.verdicts import MIB, judge_store

GOOD = Store(path="/c", seconds=0.1)


def request(folder: Path, **fields: Any) -> PreflightRequest:
    base = PreflightRequest(
        node="node-0",
        checkpoints=(folder / "checkpoints").as_uri(),
        manifest="",
        memory_bytes=MIB,
        shm_bytes=0,
        disk_bytes=MIB,
        probe_bytes=MIB,
        deadline_seconds=60,
        two_steps_deadline_seconds=150,
    )
    return replace(base, **fields)


def by_id(checks: list[Check]) -> dict[str, Check]:
    assert len({check.id for check in checks}) == len(checks)
    return {check.id: check for check in checks}


def probe(identity: str, collect: Any) -> Probe:
    return Probe(identity, identity, collect, judge_store)


def test_a_healthy_machine_passes(tmp_path: Path) -> None:
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    prepare(uri, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    checks = run_host_checks(request(tmp_path, manifest=uri))
    assert [check.id for check in checks] == ["H1", "H3.memory", "H3.shm", "H3.limits", "H4", "N5", "S1", "S3"]
    failed = [check for check in checks if check.verdict == "FAIL"]
    assert not failed
    found = by_id(checks)
    assert found["S3"].verdict == "PASS"
    assert "digits" in found["S3"].value
    assert all(check.value and check.threshold for check in checks)
    assert all(check.hint for check in checks if check.verdict != "PASS")
    assert refusal(checks, node="node-0") is None


def test_what_hangs_or_raises_is_unknown_and_holds_nothing_back() -> None:
    """Two hang until the test lets them go."""
    released = threading.Event()

    def hang() -> Store:
        released.wait()
        return GOOD

    def broken() -> Store:
        raise RuntimeError("no such tool")

    probes = [
        probe("a", hang),
        probe("b", lambda: GOOD),
        probe("c", broken),
        probe("d", hang),
        probe("e", lambda: None),
    ]
    running = Running(probes, deadline_seconds=3600)
    wait_until(lambda: running._results.qsize() == 3)
    running._started -= 3600  # the hour is over
    checks = running.finish()
    released.set()
    assert [check.verdict for check in checks] == ["UNKNOWN", "PASS", "UNKNOWN", "UNKNOWN", "UNKNOWN"]
    assert checks[0].evidence == "the check hangs"
    assert checks[2].evidence == "RuntimeError: no such tool"
    assert checks[2].hint


def test_checks_run_side_by_side() -> None:
    together = threading.Barrier(6)

    def meet() -> Store:
        together.wait(20)
        return GOOD

    checks = Running([probe(str(number), meet) for number in range(6)], deadline_seconds=20).finish()
    assert [check.verdict for check in checks] == ["PASS"] * 6


def test_failures_read_as_one_error_with_remedies(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        missing = (tmp_path / "none.json").as_uri()
        checks = run_host_checks(request(tmp_path, manifest=missing, ports=(port,)))
    error = refusal(checks, node="node-0")
    assert error is not None
    assert error.exit_code == 5
    assert f"port {port}: Address already in use" in error.message
    assert str(tmp_path / "none.json") in error.message
    assert f"choose another port than {port}" in error.hint
    assert error.where == "node-0"


class PlainNode:
    """A node that runs the two steps as a plain child: what the zygote does, without the fork."""

    def __init__(self, folder: Path, *, module: str = "training.preflight.job") -> None:
        self.folder, self._module = folder, module

    def run_once(
        self, job: str, *, call: str, environment: dict[str, str], log: Path, deadline_seconds: float
    ) -> int | None:
        assert (job, call) == ("two-steps", "two_steps")
        with (
            log.open("wb") as file,
            subprocess.Popen(
                [sys.executable, "-m", self._module],
                env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", **environment},
                stdout=file,
                stderr=file,
            ) as child,
        ):
            try:
                return child.wait(deadline_seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                return None


def test_a_node_runs_host_checks_and_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow by its nature: a child imports torch."""
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    prepare(uri, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    monkeypatch.setenv("GKR_DATA_CACHE", str(tmp_path / "cache"))
    asked = request(tmp_path, manifest=uri, train=TrainConfig(), data_cache_limit=2**20)
    checks = check_node(asked, node=PlainNode(tmp_path / "node"), log=tmp_path / "log")
    assert Cache(tmp_path / "cache").limit_bytes == 2**20, "what the checks copy stays below the limit too"
    found = by_id(checks)
    assert found["M1"].verdict == "PASS", (found["M1"], (tmp_path / "log").read_text())
    assert found["H1.scratch"].verdict != "FAIL"
    assert not list(tmp_path.glob("**/.preflight-*"))


def test_a_model_that_does_not_fit_the_data_fails_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "digits" / "manifest.json").as_uri()
    prepare(uri, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    train = TrainConfig(model=ModelConfig(image_size=16))
    for name, value in ask(tmp_path, train=train, manifest=uri).items():
        monkeypatch.setenv(name, value)
    assert job.main() == 0
    check = run_two_steps(request(tmp_path, train=train), fork=lambda: answer(tmp_path, code=0, log=tmp_path / "log"))
    assert check.verdict == "FAIL"
    assert "samples are 8 x 8 x 1 in the dataset" in check.evidence
    assert "image_size: 8" in check.hint


def test_a_child_that_dies_without_a_word_fails_and_one_that_hangs_is_unknown(tmp_path: Path) -> None:
    asked = request(tmp_path, train=TrainConfig())
    ask(tmp_path, train=TrainConfig(), manifest="")
    died = run_two_steps(asked, fork=lambda: answer(tmp_path, code=-9, log=tmp_path / "log"))
    assert died.verdict == "FAIL"
    assert "killed by signal 9" in died.evidence
    assert str(tmp_path / "log") in died.hint
    hung = run_two_steps(asked, fork=lambda: None)
    assert hung.verdict == "UNKNOWN"

    def broken() -> TwoSteps:
        raise GkrError("the zygote ended", hint="see its log")

    lost = run_two_steps(asked, fork=broken)
    assert (lost.verdict, lost.evidence, lost.hint) == ("UNKNOWN", "the zygote ended", "see its log")


def test_question_and_answer_come_back_as_they_were(tmp_path: Path) -> None:
    train = TrainConfig(learning_rate=3e-4, model=ModelConfig(conditioning="class"))
    environment = ask(tmp_path, train=train, manifest="file:///m")
    question = read_question(environment)
    assert (question.train, question.manifest, question.folder) == (train, "file:///m", tmp_path)
    write_answer(tmp_path, TwoSteps(losses=(1.5, float("inf"))))
    assert answer(tmp_path, code=0, log=tmp_path).losses == (1.5, float("inf"))
    ask(tmp_path, train=train, manifest="file:///m")  # a new question drops the old answer
    assert "ended with code 3" in answer(tmp_path, code=3, log=tmp_path).problem


def plan(folder: Path) -> Plan:
    node = NodePlan.model_validate(
        {"name": "n0", "group": "g", "machine": "local", "ranks": 2, "cpu": 1, "memory": "1Gi", "shm": "64Mi"}
    )
    learner = LearnerPlan(
        name="east", cluster="local-0", region="r", gpu=None, nodes=[node], world_size=2,
        data_manifest="file:///data/manifest.json", data_cache_limit=2**30,
        checkpoints=(folder / "checkpoints").as_uri(),
    )  # fmt: skip
    return Plan(experiment="e", run="r", backend="local", learners=[learner], train=TrainConfig())


def test_a_plan_tells_what_a_node_needs(tmp_path: Path) -> None:
    asked = PreflightRequest.for_node(plan(tmp_path), learner="east", node="n0")
    assert asked.checkpoints == (tmp_path / "checkpoints").as_uri()
    assert asked.memory_bytes == 2**30
    assert asked.shm_bytes == 64 * MIB
    assert asked.manifest == "file:///data/manifest.json"
    assert asked.data_cache_limit == 2**30
    assert asked.disk_bytes > checkpoint_bytes(TrainConfig())
    with pytest.raises(NotFoundError, match="no node 'n9'"):
        PreflightRequest.for_node(plan(tmp_path), learner="east", node="n9")


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(),
        ModelConfig(width=256, depth=12, heads=8, image_size=32, channels=3, patch_size=4),
        ModelConfig(conditioning="class", num_classes=1000, width=128),
        LanguageModelConfig(kind="lm", width=64, depth=3),
    ],
)
def test_the_count_of_parameters_is_rounded_up(config: ModelConfig | LanguageModelConfig) -> None:
    real = sum(parameter.numel() for parameter in make_network(config).parameters())
    assert real <= parameter_count(config) <= 1.5 * real
    twice = TrainConfig(model=config, checkpoint=CheckpointConfig(keep=5))
    assert checkpoint_bytes(twice) == 2 * checkpoint_bytes(TrainConfig(model=config))


def test_importing_the_checks_does_not_import_torch() -> None:
    code = "import sys, training.preflight; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
