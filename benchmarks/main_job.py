"""Claims of the main job, in one run: `make train` within 5 minutes and 8 GiB, good digits, quick recovery, quick help.

Trains the shipped recipe with one rank killed by SIGKILL half-way and measures wall time, the proportional set size of
all its processes, the scores, and the time from the kill to the first new step. What the recovery is compared with: the
start of a fresh Python process that imports what a rank needs, which is where a launcher without a zygote would begin.
Takes about five minutes; writes benchmarks/results/main_job.json.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "main_job.json"
DEADLINE_SECONDS = 840.0
SAMPLE_SECONDS = 2.0


def main() -> int:
    """Measure, print, write."""
    measured: dict[str, Any] = {"machine": {"cores": os.cpu_count(), "python": platform.python_version()}}
    gkr = [sys.executable, "-m", "gkr"]
    measured["help_ms_median"] = statistics.median(_seconds([*gkr, "--help"]) * 1e3 for _ in range(10))
    measured["second_setup_seconds"] = _seconds([sys.executable, "tools/setup.py"])
    cold = "import training.rank, torch._dynamo"
    measured["cold_import_seconds"] = min(_seconds([sys.executable, "-c", cold]) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        measured |= _train(Path(folder))
    recovery: float | None = measured["kill_to_first_step_seconds"]
    measured["recovery_over_cold_import"] = recovery / measured["cold_import_seconds"] if recovery else None
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
    sys.stdout.write(json.dumps(measured, indent=1) + "\n")
    return 0 if measured["status"] == "succeeded" else 1


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return time.perf_counter() - started


def _train(folder: Path) -> dict[str, Any]:
    started = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-m", "gkr", "launch", str(ROOT / "recipes" / "digits.yaml")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    latest, peak, killed = folder / "runs" / "latest", 0, False
    while run.poll() is None and time.monotonic() - started < DEADLINE_SECONDS:
        peak = max(peak, _set_size(folder))
        if not killed and latest.exists():
            killed = _kill_half_way(latest)
        time.sleep(SAMPLE_SECONDS)
    wall = time.monotonic() - started
    if run.poll() is None:
        subprocess.run([sys.executable, "-m", "gkr", "cancel", "--now"], cwd=folder, check=False, timeout=60)
        run.kill()
    summary: dict[str, Any] = json.loads((latest / "summary.json").read_text())
    scores: dict[str, Any] = summary["evaluation"] or {}
    real = scores.get("frechet_distance_real")
    return {
        "status": summary["status"],
        "train_wall_seconds": wall,
        "peak_set_size_gib": peak / 2**30,
        "rounds": summary["sync"]["rounds"],
        "ledger_imbalance": summary["sync"]["ledger_imbalance"],
        "learners_agree": summary["sync"]["learners_agree"],
        "evaluation": scores,
        "frechet_over_real": scores["frechet_distance"] / real if real else None,
        "kill_to_first_step_seconds": next((one["first_step_seconds"] for one in summary["recoveries"]), None),
        "recoveries": summary["recoveries"],
    }


def _set_size(folder: Path) -> int:
    """Proportional set size of everything that was started below `folder`: each shared page is counted once."""
    total = 0
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)) or str(folder) in " ".join(process.cmdline()):
                total += process.memory_full_info().pss
        except (psutil.Error, OSError):
            continue
    return total


def _kill_half_way(run: Path) -> bool:
    merged, target, pid = 0, 0, 0
    target = json.loads((run / "plan.json").read_text())["syncer"]["target_samples"]
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "sync_merged":
            merged = event["samples_total"]
        if event["kind"] == "attempt_started" and event["learner"] == "west":
            pid = event["pids"]["rank-1"]
    if not pid or merged < target / 2:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


if __name__ == "__main__":
    sys.exit(main())
