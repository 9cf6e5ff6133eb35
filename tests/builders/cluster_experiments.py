"""Launching on the clusters of a test, looking at a run until something is true, and taking pods away from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from gkr.backend import backend_of
from gkr.cluster.connection import Connection
from gkr.main import main
from gkr.runs import FINAL, Run, find_run, read_state
from gkr.watch.tail import EventTail
from manifests.names import RAY_CONTAINER
from spec.errors import EXIT_OK
from spec.events import AttemptStarted, Event, StepMetrics, SyncMerged
from spec.summary import Summary


def launch(file: Path, *, clusters: str, overrides: Sequence[str] = ()) -> Run:
    """Start and detach."""
    words = [word for one in overrides for word in ("--set", one)]
    assert main(["launch", f"{file}", "--cluster", clusters, "--detach", *words]) == EXIT_OK
    return find_run(None)


class Look:
    """A run's events as they arrive."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.events: list[Event] = []
        self._tail = EventTail(run.path)

    def until(self, what: str, done: Callable[[list[Event]], bool], *, seconds: float) -> None:
        """Refresh until `done` says so of all events so far; AssertionError at the deadline or if the run failed."""
        deadline = time.monotonic() + seconds
        with closing(backend_of(self.run).attach(self.run)) as attachment:
            while True:
                more = attachment.refresh()
                self.events += self._tail.read()
                if done(self.events):
                    return
                state = read_state(self.run.path)
                assert state.status not in FINAL or state.status == "succeeded", f"{state}: {self.last()}"
                assert more, f"the run ended without {what}: {state}"
                assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s; last: {self.last()}"
                time.sleep(attachment.poll_seconds)  # the run's own pace, bounded by the deadline above

    def for_at_least(self, seconds: float) -> None:
        """Look for this long; the run must not fail meanwhile."""
        until = time.monotonic() + seconds
        self.until("end of the wait", lambda _: time.monotonic() >= until, seconds=seconds + 60)

    def last(self) -> list[str]:
        """What was heard last, for a failure's message."""
        return [event.model_dump_json()[:300] for event in self.events[-8:]]

    def rounds(self) -> int:
        """Outer rounds merged so far."""
        return len([one for one in self.events if isinstance(one, SyncMerged)])

    def attempts(self, learner: str) -> int:
        """Highest attempt of a learner that has started."""
        started = [one for one in self.events if isinstance(one, AttemptStarted)]
        return max((one.attempt for one in started if one.learner == learner), default=0)

    def stepped(self, learner: str, *, attempt: int) -> bool:
        """True if the learner took a step in this attempt or a later one."""
        return any(
            isinstance(one, StepMetrics) and one.learner == learner and one.attempt >= attempt for one in self.events
        )

    def summary(self, *, seconds: float) -> Summary:
        """Wait for the end and read the summary."""
        self.until("end", lambda _: read_state(self.run.path).status in FINAL, seconds=seconds)
        with closing(backend_of(self.run).attach(self.run)) as attachment:
            attachment.refresh()
            attachment.fetch()
            attachment.finish()
        assert read_state(self.run.path).status == "succeeded", self.last()
        assert (self.run.path / "report.html").stat().st_size > 0
        return Summary.read_json((self.run.path / "summary.json").read_bytes())


def delete_pod(connection: Connection, *, run: Run, learner: str = "", role: str) -> str:
    """Take the first pod of a role away at once, as a lost machine would; its name. The syncer has no learner."""
    name, namespace = _first_pod(connection, run=run, learner=learner, role=role)
    connection.delete("Pod", name, namespace=namespace, grace_seconds=0)
    return name


def kill_process(connection: Connection, *, run: Run, role: str, command: str) -> str:
    """SIGKILL for the one process of that name in the first pod of a role, which stays; the pod's name."""
    name, namespace = _first_pod(connection, run=run, learner="", role=role)
    done = connection.client.exec(
        name, namespace=namespace, container=RAY_CONTAINER, command=["python", "-c", _KILL, command]
    )
    assert done.exit_code == 0, f"no process {command} in {name}"
    return name


_KILL = """
import os, pathlib, signal, sys
found = [int(one.parent.name) for one in pathlib.Path("/proc").glob("[0-9]*/cmdline")
         if one.read_bytes().startswith(sys.argv[1].encode())]
assert len(found) == 1, found
os.kill(found[0], signal.SIGKILL)
"""
"""In the pod's own process namespace."""


def _first_pod(connection: Connection, *, run: Run, learner: str, role: str) -> tuple[str, str]:
    labels = {"gkr/run": run.name, "gkr/role": role} | ({"gkr/learner": learner} if learner else {})
    pods = connection.list("Pod", namespace="*", labels=labels)
    assert pods, f"no pod {labels}"
    return str(pods[0]["metadata"]["name"]), str(pods[0]["metadata"]["namespace"])
