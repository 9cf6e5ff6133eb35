"""STAND-INS for the product's processes: small real processes with the contract's command lines and scripted behaviour.

Installed as `training/driver.py` and `training/sync/server.py` in a folder that tests use as working directory, so that
the supervisor starts them by its real command lines. What each does comes from `standin.json` in the run's folder (or
GKR_STANDIN_SCRIPT): process name -> one behaviour per attempt; the last one repeats. Standard library only: they
start fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIFE_SECONDS = 120
"""A stand-in that nobody ended kills itself after this."""


def install(folder: Path) -> Path:
    """Put the stand-ins where `python -m training...` finds them first when started in `folder`."""
    for module, role in (("driver", "driver"), ("sync/server", "syncer")):
        path = folder / "training" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"import runpy, sys\nsys.argv.insert(1, {role!r})\nrunpy.run_path({__file__!r}, run_name='__main__')\n"
        )
    for package in ("training", "training/sync"):
        (folder / package / "__init__.py").touch()
    return folder


def script(run_dir: Path, behaviours: dict[str, list[str]]) -> None:
    """Say what the processes of a run will do."""
    (run_dir / "standin.json").write_text(json.dumps(behaviours))


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["driver", "syncer"])
    for flag in ("--plan", "--events", "--learner", "--run-dir", "--endpoints", "--syncer-control", "--syncer-bulk"):
        parser.add_argument(flag, type=str)
    for flag in ("--attempt", "--control-port", "--bulk-port"):
        parser.add_argument(flag, type=int, default=0)
    given = parser.parse_args()
    signal.alarm(LIFE_SECONDS)
    if given.role == "syncer":
        _syncer(given)
    else:
        _driver(given)


def _log(text: str) -> None:
    print(text, flush=True)  # noqa: T201 stdout is its log


def _behaviour(run_dir: Path, name: str, attempt: int) -> str:
    script = Path(os.environ.get("GKR_STANDIN_SCRIPT") or run_dir / "standin.json")
    listed: list[str] = json.loads(script.read_text())[name]
    return listed[min(attempt, len(listed)) - 1]


def _say(given: argparse.Namespace, **fields: Any) -> None:
    source = f"driver/{given.learner}" if given.role == "driver" else "syncer"
    line = json.dumps({"time": time.time(), "source": source, **fields}) + "\n"
    with Path(given.events).open("ab", buffering=0) as file:
        file.write(line.encode())


def _syncer(given: argparse.Namespace) -> None:
    run_dir = Path(given.plan).parent
    starts = len(list(run_dir.glob("logs/run/*/syncer-0.log")))
    behaviour = _behaviour(run_dir, "syncer", starts)
    if behaviour == "never-serve":
        _wait_for_term(0)
    sockets = [socket.socket() for _ in range(2)]
    for one, port in zip(sockets, (given.control_port, given.bulk_port), strict=True):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
        one.listen()
    control, bulk = (f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    draft = Path(given.endpoints + ".draft")
    draft.write_text(json.dumps({"control": control, "bulk": bulk, "pid": os.getpid()}))
    draft.replace(given.endpoints)
    _log(f"syncer serves {control} {bulk}")
    if behaviour == "killed":
        # Only when a driver is connected, so that this is a death in the middle of a run.
        _until(lambda: b"attempt_started" in Path(given.events).read_bytes())
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_term(0)


def _driver(given: argparse.Namespace) -> None:
    run_dir = Path(given.run_dir)
    behaviour = _behaviour(run_dir, given.learner, given.attempt)
    _log(f"driver {given.learner} attempt {given.attempt}: {behaviour}")
    if given.syncer_control:
        host, _, port = given.syncer_control.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    if behaviour == "killed-early":
        os.kill(os.getpid(), signal.SIGKILL)
    _say(given, kind="attempt_started", learner=given.learner, attempt=given.attempt, epoch=given.attempt, world_size=2)
    if given.attempt > 1:
        fields = {"mode": "exact", "step": 5, "position": 320, "samples_lost": 128}
        _say(given, kind="restored", learner=given.learner, attempt=given.attempt, **fields)
    _step(given, 10 * given.attempt)
    match behaviour.split(":"):
        case ["finish"]:
            return
        case ["exit", code]:
            _log("Traceback (most recent call last):\n  stand-in\nValueError: shape (3,) is not (4,)")
            sys.exit(int(code))
        case ["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["wait"]:
            _wait_for_term(103)
        case ["pid"]:
            (run_dir / "state" / "standin").write_text(f"{os.getpid()}")
            _wait_for_term(103)
        case ["ignore-term"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (run_dir / "state" / "ignoring").touch()
            _wait_for_term(0)
        case ["grandchild", then]:
            child = subprocess.Popen(
                [sys.executable, "-S", "-c", f"import signal; signal.alarm({LIFE_SECONDS}); signal.pause()"]
            )
            (run_dir / "state" / "grandchild").write_text(f"{child.pid}")
            if then == "wait":
                _wait_for_term(103)
            os.kill(os.getpid(), signal.SIGKILL)
        case ["finish-after-syncer"]:
            first = given.syncer_control
            _until(lambda: len(list(run_dir.glob("logs/run/*/syncer-0.log"))) > 1 and _answers(first))
        case _:
            raise SystemExit(f"unknown stand-in behaviour {behaviour}")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _step(given: argparse.Namespace, step: int) -> None:
    fields = {
        "step": step,
        "position": step * 64,
        "round": 0,
        "loss": 1.0 / step,
        "gradient_norm": 1.0,
        "learning_rate": 0.001,
    }
    speed = {"steps_per_second": 5.0, "samples_per_second": 320.0, "loader_queue": 3}
    _say(given, kind="step", learner=given.learner, attempt=given.attempt, **fields, **speed)


def _wait_for_term(code: int) -> None:
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
    while True:
        signal.pause()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIFE_SECONDS / 2
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


if __name__ == "__main__":
    _main()
