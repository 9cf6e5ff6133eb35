"""The main process of a pod: `python -m training.pod --role ROLE -- COMMAND...`.

Runs the command and ends with its exit code. While it runs: forwards signals, reaps orphans (this is process 1 of its
container), prints every new line of the run's log files as `<learner>/<attempt>/<role>-<index> | line`, and keeps
copies of the files in the run's bucket. Must not fail because of a log or a bucket.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from spec.errors import ConfigError, GkrError
from spec.plan import Plan
from storage import Bucket, open_bucket
from training.family import Family, shell_code
from training.log_files import LogPrinter, LogShipper
from training.options import log_folder

log = logging.getLogger("pod")

TICK_SECONDS = 0.25
LAST_SHIP_SECONDS = 15.0
SYNCER = "run"
"""The learner name under which the syncer's logs stand, on every backend."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What this pod is, from its environment."""

    role: str
    run_dir: Path
    bucket: Bucket

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"


def main(arguments: list[str] | None = None) -> int:
    """Until the command has ended; its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m training.pod", description="The main process of a pod.")
    parser.add_argument("--role", required=True, choices=["head", "trainer", "service", "syncer"])
    parser.add_argument("command", nargs="+", help="after --: what to run")
    given = parser.parse_args(arguments)
    try:
        pod = read_pod(given.role, environment=os.environ)
    except GkrError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return run(pod, command=given.command)


def read_pod(role: str, *, environment: Mapping[str, str]) -> Pod:
    """Role, folder and bucket."""
    missing = [name for name in ("GKR_PLAN", "GKR_RUN_DIR") if not environment.get(name)]
    if missing:
        raise ConfigError(f"not a pod of a run: {', '.join(missing)} not set", hint="pods are started by `gkr launch`")
    try:
        plan = Plan.read_json(Path(environment["GKR_PLAN"]).read_bytes())
    except OSError as error:
        raise ConfigError(f"the plan cannot be read: {error.strerror}", where=environment["GKR_PLAN"]) from error
    name = environment.get("GKR_LEARNER")
    learner = plan.learner(name) if name else plan.home
    return Pod(role=role, run_dir=Path(environment["GKR_RUN_DIR"]), bucket=open_bucket(learner.run_uri))


def run(pod: Pod, *, command: list[str]) -> int:
    """The pod's life."""
    pod.logs.mkdir(parents=True, exist_ok=True)
    # Ray would keep a node that gets SIGTERM for 30 s, for work that moves away. Ours never does: ranks would run on
    # for that long, be killed all the same, and only then could their replacement begin.
    os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    printer = LogPrinter(pod.logs, write=_write)  # before the command: what it logs is new
    with _Signals() as signals:
        output = None if pod.role != "syncer" else _syncer_log(pod).open("ab")
        family = Family(command, output=output)
        shipper = LogShipper(pod.logs, bucket=pod.bucket, state=pod.run_dir / "state" / "logs")
        while family.reap() is None:
            signals.wait(TICK_SECONDS)
            for number in signals.take():
                log.info("%s: passing it on", signal.Signals(number).name)
                family.signal(number)
            printer.step()
    printer.step(last=True)
    if not shipper.close(deadline_seconds=LAST_SHIP_SECONDS):
        log.warning("logs are not all in the bucket after %g s", LAST_SHIP_SECONDS)
    assert family.code is not None
    return shell_code(family.code)


def _syncer_log(pod: Pod) -> Path:
    """Its output is a log file like every other; attempts count on from those in the bucket and those here."""
    attempts = [0]
    try:
        attempts += [int(entry.key.split("/")[2]) for entry in pod.bucket.list(f"logs/{SYNCER}")]
    except (GkrError, ValueError) as error:
        log.warning("cannot look for earlier logs: %s", error)
    attempts += [int(path.name) for path in (pod.logs / SYNCER).glob("*") if path.name.isdecimal()]
    path = pod.run_dir / log_folder(SYNCER, attempt=max(attempts) + 1) / "syncer-0.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


class _Signals:
    """Signals as they come, without a handler that acts."""

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self._taken: list[int] = []
        self._receive, self._send = socket.socketpair()
        for end in (self._receive, self._send):
            end.setblocking(False)  # noqa: FBT003 the socket module's own signature
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._receive, selectors.EVENT_READ)

    def __enter__(self) -> _Signals:
        for number in (*_FORWARDED, signal.SIGCHLD):
            self._former[number] = signal.signal(number, self._note)
        signal.set_wakeup_fd(self._send.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, former in self._former.items():
            signal.signal(number, former)
        self._selector.close()
        self._receive.close()
        self._send.close()

    def wait(self, seconds: float) -> None:
        """Until a signal or `seconds` have passed."""
        if self._selector.select(seconds):
            self._receive.recv(4096)

    def take(self) -> list[int]:
        """What came since the last look, to be passed on."""
        taken, self._taken = self._taken, []
        return taken

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number != signal.SIGCHLD:
            self._taken.append(number)


if __name__ == "__main__":
    sys.exit(main())
