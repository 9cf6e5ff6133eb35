"""The host of long-lived services: `python -m services.standing --plan PLAN --first-port PORT`.

Runs beside the head of a Ray cluster that holds nothing but services. Starts the replicas of the plan's only learner,
each on a port known before, and starts those that die again, until it is told to stop or Ray is gone. A service that
does not come up at all ends it, so that whoever watches the pod sees it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

from services.hosting import PollResult, join_ray, leave_ray, start_services
from spec.errors import ConfigError, GkrError
from spec.plan import Plan

_log = logging.getLogger("standing")

HEAD = "127.0.0.1:6379"
"""Where the head of this machine listens; KubeRay says so in RAY_ADDRESS."""
JOIN_SECONDS = 120.0
POLL_SECONDS = 5.0
PLACEMENT_SECONDS = 3600.0
"""How long a replica may wait for its pod: a pool may have to grow."""
CLOSE_SECONDS = 10.0


class Hosts(Protocol):
    """What this module needs of `services.hosting.ServiceHosts`."""

    def poll(self, deadline_seconds: float, *, patient: bool = False) -> PollResult:
        """Look at every replica."""
        ...


def watch(hosts: Hosts, *, stopped: Callable[[float], bool]) -> int:
    """Poll until stopped; 1 as soon as a replica is given up. `stopped` waits for at most the given seconds."""
    serving: set[str] = set()
    while True:
        seen = hosts.poll(POLL_SECONDS)
        for death in seen.deaths:
            _log.warning("%s-%d died: %s", death.service, death.index, death.cause)
        now = {f"{one.service}-{one.index} on {one.endpoint}" for one in seen.directory.replicas}
        for one in sorted(now - serving):
            _log.info("%s serves", one)
        serving = now
        if seen.failed:
            _log.error("given up: %s", "; ".join(f"{name}: {cause}" for name, cause in sorted(seen.failed.items())))
            return 1
        if stopped(POLL_SECONDS):
            return 0


def main(arguments: list[str] | None = None) -> int:
    """Until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m services.standing", description="The host of long-lived services.")
    parser.add_argument("--plan", type=Path, required=True, help="the plan whose only learner has the services")
    parser.add_argument("--first-port", type=int, required=True, help="port of the first replica; the others follow")
    given = parser.parse_args(arguments)
    stop = threading.Event()

    def told(number: int, frame: FrameType | None) -> None:
        del number, frame
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    try:
        return _host(given.plan, first_port=given.first_port, stop=stop)
    except GkrError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _host(path: Path, *, first_port: int, stop: threading.Event) -> int:
    try:
        plan = Plan.read_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the plan cannot be read: {error.strerror}", where=str(path)) from error
    learner = plan.home
    join_ray(os.environ.get("RAY_ADDRESS", HEAD), deadline_seconds=JOIN_SECONDS)
    try:
        hosts = start_services(
            learner,
            manifest=learner.data_manifest,
            cache_dir="state/cache",
            log_dir=f"logs/{learner.name}/1",
            placement_seconds=PLACEMENT_SECONDS,
            first_port=first_port,
        )
        try:
            return watch(hosts, stopped=stop.wait)
        finally:
            hosts.close(deadline_seconds=CLOSE_SECONDS)
    finally:
        leave_ray()


if __name__ == "__main__":
    sys.exit(main())
