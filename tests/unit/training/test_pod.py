"""The main process of a pod, as a real process: signals, orphans, logs and the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from storage import open_bucket
from tests.builders.local_runs import REPOSITORY, plan
from training.log_files import LogPrinter, LogShipper

SECONDS = 60.0


def until(holds: Callable[[], bool]) -> None:
    deadline, tick = time.monotonic() + SECONDS, threading.Event()
    while not holds():
        assert time.monotonic() < deadline
        tick.wait(0.02)


def start(root: Path, script: str, *, role: str = "trainer") -> subprocess.Popen[str]:
    made = plan("east", "west")
    learners = [one.model_copy(update={"run_uri": (root / "bucket").as_uri()}) for one in made.learners]
    (root / "plan.json").write_text(made.model_copy(update={"learners": learners}).write_json())
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "GKR_PLAN": str(root / "plan.json"),
        "GKR_RUN_DIR": str(root / "run"),
        "GKR_LEARNER": "" if role == "syncer" else "east",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "training.pod", "--role", role, "--", "bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_log_lines_are_printed_with_their_place_and_shipped(tmp_path: Path) -> None:
    log = tmp_path / "run" / "logs" / "east" / "2" / "rank-0.log"
    script = f"mkdir -p {log.parent}; printf 'one\\n10%%\\r50%%\\r100%%\\ntail' > {log}; exit 7"
    process = start(tmp_path, script)
    out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 7, error
    assert out.splitlines() == ["east/2/rank-0 | one", "east/2/rank-0 | 100%", "east/2/rank-0 | tail"]
    shipped = open_bucket((tmp_path / "bucket").as_uri()).get("logs/east/2/rank-0.log")
    assert shipped.data == log.read_bytes()


def test_a_signal_reaches_the_command_and_what_it_runs(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = start(tmp_path, f"trap 'echo got it; exit 9' TERM; touch {ready}; sleep 600; exit 1")
    until(ready.exists)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 9, error
    assert out == "got it\n"


def test_a_command_that_a_signal_ended_gives_the_shells_code(tmp_path: Path) -> None:
    process = start(tmp_path, "kill -KILL $$")
    process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGKILL


def test_orphans_are_reaped(tmp_path: Path) -> None:
    """A grandchild whose parent is gone ends; without a reaper it would stay a zombie."""
    pid = tmp_path / "pid"
    process = start(tmp_path, f"(sleep 0.2 & echo $! > {pid}); sleep 600")
    try:
        until(lambda: pid.exists() and bool(pid.read_text().strip()))
        orphan = int(pid.read_text())
        until(lambda: not psutil.pid_exists(orphan))
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def test_the_syncers_output_is_a_log_like_every_other(tmp_path: Path) -> None:
    open_bucket((tmp_path / "bucket").as_uri()).put("logs/run/3/syncer-0.log", b"of the pod before\n")
    process = start(tmp_path, "echo serving; exit 0", role="syncer")
    out, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, error
    assert out == "run/4/syncer-0 | serving\n"
    assert open_bucket((tmp_path / "bucket").as_uri()).get("logs/run/4/syncer-0.log").data == b"serving\n"


def test_a_pod_that_is_not_told_its_plan_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "training.pod", "--role", "head", "--", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("GKR_")}, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    assert done.returncode == 3
    assert "GKR_PLAN, GKR_RUN_DIR not set" in done.stderr


def test_the_log_of_a_replaced_pod_stays_in_front(tmp_path: Path) -> None:
    bucket = open_bucket((tmp_path / "bucket").as_uri())
    for pod, text in (("one", "first\n"), ("two", "second\n"), ("two", "third\n")):
        path = tmp_path / pod / "logs" / "east" / "1" / "service-encoder-0.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)
        shipper = LogShipper(tmp_path / pod / "logs", bucket=bucket, state=tmp_path / pod / "state")
        assert shipper.close(deadline_seconds=SECONDS)
    assert bucket.get("logs/east/1/service-encoder-0.log").data == b"first\nsecond\nthird\n"


def test_logs_of_the_container_before_are_not_printed_again(tmp_path: Path) -> None:
    path = tmp_path / "east" / "1" / "rank-0.log"
    path.parent.mkdir(parents=True)
    path.write_text("old\n")
    said: list[str] = []
    printer = LogPrinter(tmp_path, write=said.append)
    with path.open("a") as file:
        file.write("new\n")
    printer.step(last=True)
    assert said == ["east/1/rank-0 | new\n"]
