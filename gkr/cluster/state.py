"""What the objects of a run say about its state; pure.

Promises: a run is over only when each of its jobs is over or gone; the first job that failed gives the reason and,
where its driver said one, the exit code of the contract. Must not ask a cluster anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gkr.cluster.fields import Object, items, part, text
from spec.errors import EXIT_FAILED, EXIT_OK, EXIT_PREFLIGHT, EXIT_REFUSED, EXIT_UNFINISHED

Phase = Literal["queued", "starting", "running", "succeeded", "failed", "ending", "gone"]
OVER = frozenset({"succeeded", "failed", "gone"})
_KNOWN_CODES = frozenset({EXIT_PREFLIGHT, EXIT_REFUSED})
_EXIT_CODE = re.compile(r"exit code (\d+)")
_LONGEST = 300


@dataclass(frozen=True)
class JobState:
    """One learner's job."""

    phase: Phase
    reason: str = ""
    exit_code: int = EXIT_FAILED


@dataclass(frozen=True)
class Standing:
    """The whole run."""

    status: Literal["preparing", "running", "succeeded", "failed", "cancelled"]
    reason: str = ""
    exit_code: int = EXIT_UNFINISHED


def job_state(job: Object | None, *, workload: Object | None = None) -> JobState:
    """Of a RayJob as the server returned it, with the Kueue Workload that it owns."""
    if job is None:
        return JobState("gone", "its RayJob is gone from the cluster")
    if job["metadata"].get("deletionTimestamp"):
        return JobState("ending", "is being removed")
    status = part(job, "status")
    deployment, outcome = text(status, "jobDeploymentStatus"), text(status, "jobStatus")
    if deployment == "Failed" or (deployment == "Complete" and outcome != "SUCCEEDED"):
        return _failed(status)
    if deployment == "Complete":
        return JobState("succeeded", exit_code=EXIT_OK)
    if deployment == "Running" and outcome in {"RUNNING", "SUCCEEDED", "FAILED", "STOPPED"}:
        return JobState("running")
    if part(job, "spec").get("suspend") or deployment in {"Suspended", "Suspending"}:
        return JobState("queued", queue_reason(workload))
    return JobState("starting", "its pods start")


def queue_reason(workload: Object | None) -> str:
    """Why a job waits, in Kueue's words."""
    if workload is None:
        return "waits for Kueue to see it"
    conditions = {text(one, "type"): one for one in items(workload, "status", "conditions")}
    for kind in ("Finished", "Evicted", "Preempted"):
        if _holds(conditions, kind) and not _holds(conditions, "QuotaReserved"):
            return _line(f"{kind.lower()}: {text(conditions[kind], 'message')}")
    if not _holds(conditions, "QuotaReserved"):
        return _line(text(conditions, "QuotaReserved", "message") or "waits for its turn in the queue")
    if not _holds(conditions, "Admitted"):
        return _line(text(conditions, "Admitted", "message") or "has quota, waits for admission checks")
    return "admitted, about to start"


def standing(jobs: Mapping[str, JobState]) -> Standing:
    """The run from its learners' jobs."""
    states = list(jobs.values())
    if states and all(one.phase == "gone" for one in states):
        return Standing("failed", "its objects are gone from the cluster and nobody said how it ended", EXIT_FAILED)
    if all(one.phase in OVER for one in states):
        return _ended(jobs)
    if any(one.phase == "ending" for one in states):
        return Standing("running", "is being removed")
    waiting = [f"{name}: {one.reason}" for name, one in jobs.items() if one.phase in {"queued", "starting"}]
    failed = [f"{name} failed: {one.reason}" for name, one in jobs.items() if one.phase in {"failed", "gone"}]
    reason = "; ".join([*failed, *waiting])
    return Standing("running" if any(one.phase == "running" for one in states) else "preparing", reason)


def _ended(jobs: Mapping[str, JobState]) -> Standing:
    for name, one in jobs.items():
        if one.phase == "failed":
            return Standing("failed", f"{name}: {one.reason}", one.exit_code)
    for name, one in jobs.items():
        if one.phase == "gone":
            return Standing("failed", f"{name}: {one.reason}", EXIT_FAILED)
    return Standing("succeeded", exit_code=EXIT_OK)


def _failed(status: Object) -> JobState:
    """KubeRay puts the end of the driver's log into the message; its last line is what the driver died of."""
    message, why = text(status, "message"), text(status, "reason")
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    match = _EXIT_CODE.search(message)
    code = int(match[1]) if match and int(match[1]) in _KNOWN_CODES else EXIT_FAILED
    if why == "DeadlineExceeded":
        return JobState("failed", _line(f"took too long: {lines[0] if lines else 'timeouts.run has passed'}"), code)
    last = lines[-1] if lines else "its job failed and left no message"
    return JobState("failed", _line(last if why in {"", "AppFailed"} else f"{why}: {last}"), code)


def _holds(conditions: Mapping[str, Object], kind: str) -> bool:
    return text(conditions, kind, "status") == "True"


def _line(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
