"""A run's state from its objects."""

from __future__ import annotations

from typing import Any

import pytest

from gkr.cluster.state import JobState, job_state, queue_reason, standing
from spec.errors import EXIT_FAILED, EXIT_OK, EXIT_PREFLIGHT, EXIT_UNFINISHED


def _job(deployment: str = "", job: str = "", *, suspend: bool = False, **status: str) -> dict[str, Any]:
    found = {"jobDeploymentStatus": deployment, "jobStatus": job, **status}
    return {"metadata": {"name": "j"}, "spec": {"suspend": suspend}, "status": found}


def _workload(**conditions: tuple[str, str]) -> dict[str, Any]:
    return {
        "status": {
            "conditions": [{"type": key, "status": one, "message": why} for key, (one, why) in conditions.items()]
        }
    }


@pytest.mark.parametrize(
    ("job", "phase"),
    [
        (None, "gone"),
        (_job(suspend=True), "queued"),
        (_job("Suspended", suspend=True), "queued"),
        (_job("Initializing"), "starting"),
        (_job("Running"), "starting"),
        (_job("Running", "PENDING"), "starting"),
        (_job("Running", "RUNNING"), "running"),
        (_job("Running", "SUCCEEDED"), "running"),
        (_job("Complete", "SUCCEEDED"), "succeeded"),
        (_job("Complete", "FAILED"), "failed"),
        (_job("Failed"), "failed"),
        ({"metadata": {"deletionTimestamp": "2026-11-30T14:37:55Z"}}, "ending"),
    ],
)
def test_phase_of_a_rayjob(job: dict[str, Any] | None, phase: str) -> None:
    assert job_state(job).phase == phase


def test_failure_is_the_last_line_of_the_drivers_log_and_its_exit_code() -> None:
    message = (
        "Job entrypoint command failed with exit code 5, last available logs:\nstarting\npreflight: GPU 3 is gone\n"
    )
    state = job_state(_job("Failed", "FAILED", reason="AppFailed", message=message))
    assert (state.reason, state.exit_code) == ("preflight: GPU 3 is gone", EXIT_PREFLIGHT)


def test_exit_code_that_is_not_of_the_contract_is_a_plain_failure() -> None:
    assert job_state(_job("Failed", "FAILED", message="failed with exit code 17")).exit_code == EXIT_FAILED


def test_deadline_is_named() -> None:
    state = job_state(_job("Failed", reason="DeadlineExceeded", message="The RayJob has passed the deadline"))
    assert state.reason == "took too long: The RayJob has passed the deadline"


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (None, "waits for Kueue to see it"),
        (_workload(QuotaReserved=("False", "needs 16 more nvidia.com/gpu")), "needs 16 more nvidia.com/gpu"),
        (_workload(), "waits for its turn in the queue"),
        (
            _workload(Evicted=("True", "by a higher priority"), QuotaReserved=("False", "x")),
            "evicted: by a higher priority",
        ),
        (_workload(QuotaReserved=("True", "")), "has quota, waits for admission checks"),
        (_workload(QuotaReserved=("True", ""), Admitted=("True", "")), "admitted, about to start"),
    ],
)
def test_reason_of_the_queue(workload: dict[str, Any] | None, reason: str) -> None:
    assert queue_reason(workload) == reason


def _states(**phases: str) -> dict[str, JobState]:
    return {name: JobState(phase, f"{name} is {phase}") for name, phase in phases.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phases", "status", "code"),
    [
        ({"a": "queued", "b": "queued"}, "preparing", EXIT_UNFINISHED),
        ({"a": "starting", "b": "queued"}, "preparing", EXIT_UNFINISHED),
        ({"a": "running", "b": "queued"}, "running", EXIT_UNFINISHED),
        ({"a": "running", "b": "failed"}, "running", EXIT_UNFINISHED),
        ({"a": "ending", "b": "gone"}, "running", EXIT_UNFINISHED),
        ({"a": "succeeded", "b": "succeeded"}, "succeeded", EXIT_OK),
        ({"a": "succeeded", "b": "failed"}, "failed", EXIT_FAILED),
        ({"a": "succeeded", "b": "gone"}, "failed", EXIT_FAILED),
        ({"a": "gone", "b": "gone"}, "failed", EXIT_FAILED),
    ],
)
def test_run_is_over_only_when_each_job_is(phases: dict[str, str], status: str, code: int) -> None:
    found = standing(_states(**phases))
    assert (found.status, found.exit_code) == (status, code)


def test_reason_of_a_run_names_its_learners() -> None:
    found = standing(_states(east="running", west="queued", north="failed"))
    assert found.reason == "north failed: north is failed; west: west is queued"
