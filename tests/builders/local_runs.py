"""Local runs for tests of the supervisor and the commands: small plans, run folders, processes with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spec.events import Event, read_events
from spec.link import LinkConfig
from spec.plan import LearnerPlan, NodePlan, Plan, SyncerPlan
from spec.sync import SyncConfig
from spec.train import TrainConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 90.0


def plan(*names: str, synced: bool = True, run: str = "20261130-120000-abc123", link: LinkConfig | None = None) -> Plan:
    """A plan of learners with one rank each, all behind the same kind of link."""
    node = NodePlan(name="node-0", group="trainer", machine="local-cpu", ranks=2, cpu=1.0, memory=2**31, shm=2**28)
    learners = [
        LearnerPlan(
            name=name, cluster=f"local-{index}", region=f"local-{index}", gpu=None, nodes=[node], world_size=2,
            data_manifest="file:///nowhere/manifest.json", checkpoints=f"file:///nowhere/{name}",
            link=link,
        )
        for index, name in enumerate(names or ("east", "west"))
    ]  # fmt: skip
    syncer = SyncerPlan(
        cluster="local-0", control_port=0, bulk_port=0, store="file:///nowhere/sync", config=SyncConfig(),
        target_samples=51_200, round_samples=1_280,
    )  # fmt: skip
    return Plan(
        experiment="digits",
        run=run,
        backend="local",
        learners=learners,
        train=TrainConfig(),
        syncer=syncer if synced else None,
    )


def run_folder(root: Path, plan: Plan) -> Path:
    """The folder as the launcher makes it."""
    folder = root / plan.experiment / plan.run
    for name in ("checkpoints", "sync", "samples", "logs", "state"):
        (folder / name).mkdir(parents=True)
    (folder / "plan.json").write_text(plan.model_dump_json())
    return folder


def events(folder: Path) -> list[Event]:
    """All events of a run."""
    return list(read_events((folder / "events.jsonl").read_text().splitlines()))


def environment(**more: str) -> dict[str, str]:
    """For a process that must find this checkout and no cluster that was added by the person who runs the tests.

    Bytecode goes to a place that tests share, so that starts stay fast.
    """
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONDONTWRITEBYTECODE", "GKR_RUNS"}}
    return {**kept, "PYTHONPATH": f"{REPOSITORY}", "GKR_CONFIG": "/nonexistent/gkr", "OMP_NUM_THREADS": "1", **more}


def gkr(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """One command line in a process of its own."""
    command = [sys.executable, "-m", "gkr", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )


def start(*arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """A Python module in a process of its own, its outputs in pipes."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Until `condition` holds; a failure that says what was waited for after the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS:g} s for {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A process that exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that we started, if it is still there, and close its pipes."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_SECONDS)
