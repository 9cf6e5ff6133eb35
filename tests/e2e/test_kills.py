"""A real run that loses one of everything and succeeds all the same.

Slow because it trains for real: two learners, two ranks each, services, syncer; every kind of process gets SIGKILL
once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from spec.events import AttemptStarted, Event, Recovery, Restored, StepMetrics, SyncMerged
from spec.services import Directory
from tests.builders.follow import Follower

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "train.samples": "14080",
    "train.batch": "32",
    "sync.inner_steps": "10",
    "train.checkpoint.every_steps": "10",
    "train.warmup_samples": "640",
    "train.evaluation.every_rounds": "6",
    "train.evaluation.final_samples": "60",
    "train.evaluation.samples": "20",
    "train.dtype": "float32",
}
MINUTE = 60.0


def under_way(events: list[Event]) -> SyncMerged | None:
    """The first merge once all train: a round may close without a learner that is still starting."""
    stepped = {event.learner for event in events if isinstance(event, StepMetrics)}
    if stepped != {"east", "west"}:
        return None
    return next((event for event in events if isinstance(event, SyncMerged) and event.round), None)


def last_start(events: list[Event], learner: str) -> AttemptStarted:
    return [event for event in events if isinstance(event, AttemptStarted) and event.learner == learner][-1]


def recovery(events: list[Event], what: str) -> Recovery | None:
    return next((event for event in events if isinstance(event, Recovery) and event.what.startswith(what)), None)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_rank(follow: Follower, learner: str, *, what: str, again: int) -> int:
    """Kill a rank of the newest attempt (newer than `again`) and return that attempt's number."""

    def newest(events: list[Event]) -> AttemptStarted | None:
        start = last_start(events, learner)
        return start if start.attempt > again else None

    start = follow.until(newest, deadline_seconds=2 * MINUTE, what=f"an attempt after {again}")
    _kill(start.pids[what.replace(" ", "-")])
    return start.attempt


def loader_workers(pid: int) -> list[int]:
    """The children of a rank's forkserver."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if child.ppid() != pid]


def driver_of(folder: Path, learner: str) -> int:
    for process in psutil.process_iter(["pid", "cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if "training.driver" in words and str(folder / "plan.json") in words and learner in words:
            return process.pid
    raise AssertionError(f"no driver of {learner}")


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_run_that_loses_one_of_everything_succeeds(tmp_path: Path) -> None:
    run, folder = launch(tmp_path)
    follow = Follower(folder)
    try:
        follow.until(under_way, deadline_seconds=3 * MINUTE, what="round 1, and steps of both")
        _kill(loader_workers(last_start(follow.events, "west").pids["rank-1"])[0])
        follow.until(
            lambda events: recovery(events, "loader worker"), deadline_seconds=MINUTE, what="loader worker replaced"
        )

        directory = Directory.read_json((folder / "state" / "services-east.json").read_text())
        _kill(next(one.pid for one in directory.replicas if one.service == "encoder"))
        follow.until(
            lambda events: recovery(events, "service encoder"), deadline_seconds=MINUTE, what="encoder restarted"
        )

        _kill(last_start(follow.events, "west").pids["agent-0"])
        follow.until(lambda events: recovery(events, "agent"), deadline_seconds=2 * MINUTE, what="agent replaced")

        _kill(json.loads((folder / "state" / "syncer.json").read_text())["pid"])
        follow.until(lambda events: recovery(events, "syncer"), deadline_seconds=MINUTE, what="syncer restarted")

        east = last_start(follow.events, "east")
        _kill(east.pids["rank-1"])
        follow.until(lambda events: recovery(events, "rank 1"), deadline_seconds=2 * MINUTE, what="rank replaced")

        attempt = kill_rank(follow, "east", what="rank 0", again=0)
        kill_rank(follow, "east", what="rank 0", again=attempt)  # before its first step: lost samples count once

        _kill(driver_of(folder, "west"))
        follow.until(lambda events: recovery(events, "driver"), deadline_seconds=2 * MINUTE, what="driver restarted")
        code = run.wait(timeout=5 * MINUTE)
    finally:
        end(run, tmp_path)
    follow.read()
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert (code, summary["status"]) == (0, "succeeded")
    assert summary["sync"]["learners_agree"] is True
    assert summary["sync"]["ledger_imbalance"] == 0
    assert summary["sync"]["rounds"] >= 14080 // 640
    assert all(learner["ledger"]["merged"] > 0 for learner in summary["learners"])
    causes = {entry["what"].split()[0] for entry in summary["recoveries"]}
    assert causes >= {"loader", "service", "agent", "syncer", "rank", "driver"}
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines), "an event was handed on twice"
    rank = next(entry for entry in summary["recoveries"] if entry["what"] == "rank 1" and entry["learner"] == "east")
    assert rank["cause"] == "SIGKILL"
    assert rank["first_step_seconds"] is not None
    assert rank["lost_steps"] <= 20
    restored = [event for event in follow.events if isinstance(event, Restored) and event.attempt > 1]
    assert restored
    assert all(event.mode in {"exact", "shared"} for event in restored)
    assert (folder / "report.html").stat().st_size > 10_000
    assert not left_over(folder), "processes outlive the run"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_decoupled_run_that_loses_a_rank_and_its_syncer_ends_with_equal_weights(tmp_path: Path) -> None:
    run, folder = launch(tmp_path, **{"sync.mode": "decoupled"})
    follow = Follower(folder)
    try:
        follow.until(under_way, deadline_seconds=3 * MINUTE, what="version 1, and steps of both")
        _kill(last_start(follow.events, "west").pids["rank-1"])
        follow.until(lambda events: recovery(events, "rank 1"), deadline_seconds=2 * MINUTE, what="rank replaced")
        _kill(json.loads((folder / "state" / "syncer.json").read_text())["pid"])
        follow.until(lambda events: recovery(events, "syncer"), deadline_seconds=MINUTE, what="syncer restarted")
        code = run.wait(timeout=5 * MINUTE)
    finally:
        end(run, tmp_path)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert (code, summary["status"]) == (0, "succeeded")
    assert (summary["sync"]["mode"], summary["sync"]["learners_agree"]) == ("decoupled", True)
    assert summary["sync"]["ledger_imbalance"] == 0
    assert all(learner["ledger"]["pending"] == 0 for learner in summary["learners"]), "drained"
    assert not left_over(folder), "processes outlive the run"


def test_a_model_that_does_not_fit_its_encoder_ends_at_once_with_one_line(tmp_path: Path) -> None:
    """A person's error: no retry, the place and the remedy, no traceback."""
    run, folder = launch(tmp_path, **{"train.model.text_width": "100"})
    try:
        code = run.wait(timeout=3 * MINUTE)
    finally:
        end(run, tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert code == 3
    assert summary["status"] == "failed"
    assert "train.model.text_width to 384" in summary["reason"]
    assert "Traceback" not in (tmp_path / "out.txt").read_text()
    assert all(learner["restarts"] == 0 for learner in summary["learners"])


def launch(tmp_path: Path, **changes: str) -> tuple[subprocess.Popen[str], Path]:
    """Start the digits recipe with small settings; returns the watching process and the run's folder."""
    settings = [word for key, value in {**SETTINGS, **changes}.items() for word in ("--set", f"{key}={value}")]
    with (tmp_path / "out.txt").open("w") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "gkr", "launch", str(ROOT / "recipes" / "digits.yaml"), *settings],
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    latest = tmp_path / "runs" / "latest"
    watcher = Follower(latest)
    watcher.until(lambda events: bool(events) or None, deadline_seconds=MINUTE, what="the run's first event")
    return run, latest.resolve()


def end(run: subprocess.Popen[str], tmp_path: Path) -> None:
    """Whatever happened, nothing of this run stays."""
    if run.poll() is None:
        subprocess.run(
            [sys.executable, "-m", "gkr", "cancel", "--now"], cwd=tmp_path, check=False, capture_output=True, timeout=60
        )
        run.kill()
        run.wait(timeout=30)


def left_over(folder: Path) -> list[str]:
    """Processes that still name the run's folder."""
    found: list[str] = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.pid != os.getpid():
            found.append(" ".join(words)[:200])
    return found
