"""A short real `make train` that loses a rank on the way, and assertions on its summary. Used by `.ci/run`.

The first rank of the second learner gets SIGKILL once the second outer round is merged. The run must succeed all the
same, with the recovery in its summary and nothing lost in its ledger.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 600
SETTINGS = "train.samples=28160 train.evaluation.every_rounds=4"
KEYS = {
    "status",
    "wall_seconds",
    "versions",
    "learners",
    "sync",
    "evaluation",
    "preflight",
    "services",
    "recoveries",
}


def main() -> int:
    """Run, kill, wait, judge."""
    latest = ROOT / "runs" / "latest"
    before = latest.resolve() if latest.exists() else None
    make = subprocess.Popen(["make", "train", f"SET={SETTINGS}"], cwd=ROOT)
    deadline = time.monotonic() + DEADLINE_SECONDS
    killed = False
    while make.poll() is None:
        if time.monotonic() > deadline:
            make.terminate()
            sys.stderr.write(f"short training did not end within {DEADLINE_SECONDS} s\n")
            return 1
        if not killed and latest.exists() and latest.resolve() != before:
            killed = _kill_when_merged(latest)
        time.sleep(0.2)
    if make.returncode:
        sys.stderr.write(f"make train ended with {make.returncode}\n")
        return 1
    summary = json.loads((latest / "summary.json").read_text())
    problems = _judge(summary, killed=killed)
    sys.stdout.write(
        json.dumps(
            {key: summary[key] for key in ("status", "wall_seconds", "sync", "evaluation", "recoveries")}, indent=1
        )
        + "\n"
    )
    for problem in problems:
        sys.stderr.write(f"summary: {problem}\n")
    sys.stdout.write(f"short training: {'ok' if not problems else 'FAILED'}\n")
    return 1 if problems else 0


def _kill_when_merged(run: Path) -> bool:
    path = run / "events.jsonl"
    if not path.exists():
        return False
    pid, merged = 0, 0
    for line in path.read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "attempt_started" and event["learner"] == "west":
            pid = event["pids"]["rank-0"]
        if event["kind"] == "sync_merged":
            merged = max(merged, event["round"])
    if not pid or merged < 2:
        return False
    os.kill(pid, signal.SIGKILL)
    sys.stdout.write(f"killed rank 0 of west (pid {pid}) after round {merged}\n")
    sys.stdout.flush()
    return True


def _judge(summary: dict[str, Any], *, killed: bool) -> list[str]:
    sync: dict[str, Any] = summary.get("sync") or {}
    evaluation: dict[str, Any] = summary.get("evaluation") or {}
    wanted: dict[str, bool] = {
        "every key of the contract": summary.keys() >= KEYS,
        "status succeeded": summary.get("status") == "succeeded",
        "a rank was killed": killed,
        "a recovery by SIGKILL": any(
            one["learner"] == "west" and "SIGKILL" in one["cause"] for one in summary["recoveries"]
        ),
        "at least 5 rounds": sync.get("rounds", 0) >= 5,
        "learners agree": sync.get("learners_agree") is True,
        "ledger balance 0": sync.get("ledger_imbalance") == 0,
        "classifier accuracy on real digits at least 0.95": evaluation.get("classifier_accuracy_real", 0) >= 0.95,
        "generated digits that the classifier reads better than chance": evaluation.get("classifier_accuracy", 0)
        >= 0.3,
        "no preflight failure": summary["preflight"]["failed"] == 0 and summary["preflight"]["passed"] > 0,
        "encoder used": any(service["requests"] > 0 for service in summary["services"].values()),
        "services sealed": _sealed(ROOT / "runs" / "latest" / "state"),
        "report": (ROOT / "runs" / "latest" / "report.html").stat().st_size > 10_000,
    }
    return [f"wanted {name}" for name, holds in wanted.items() if not holds]


def _sealed(state: Path) -> bool:
    """Every replica heard this run only."""
    directories = [json.loads(one.read_text()) for one in state.glob("services-*.json")]
    replicas = [replica for directory in directories for replica in directory["replicas"]]
    return len(directories) == 2 and bool(replicas) and all(replica["sealed"] for replica in replicas)


if __name__ == "__main__":
    sys.exit(main())
