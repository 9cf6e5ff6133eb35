"""Kubernetes clusters as a backend.

Nobody owns a run here but its own pods: whoever looks at it brings its folder up to date from the cluster's objects and
the buckets, and only a cancel changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gkr.backend import Attachment, Say
from gkr.cluster.buckets import run_bucket
from gkr.cluster.cancel import remove
from gkr.cluster.connection import Connection, connect
from gkr.cluster.fields import Object, items
from gkr.cluster.launch import connected, launch, prepare
from gkr.cluster.mirror import Mirror, append, locked, note_standing, status_event
from gkr.cluster.observe import observe
from gkr.cluster.places import read_places
from gkr.cluster.preflight import preflight
from gkr.cluster.registry import read_registry
from gkr.cluster.state import standing
from gkr.cluster.waiting import Reasons
from gkr.output import say as tell
from gkr.plan_file import read_plan
from gkr.runs import FINAL, Run, read_state
from spec.errors import EXIT_CANCELLED, GkrError, RefusedError, UnreachableError
from spec.events import RunStatus
from spec.plan import Plan
from storage import Bucket

PATIENCE_SECONDS = 300.0
"""A cluster that does not answer for so long ends the watching, not the run."""
FLUSH_SECONDS = 20.0
"""After the jobs ended: how long the last events and logs of other pods may take to reach the bucket."""
CREATION_SECONDS = 120.0
_ENDED = frozenset({"Complete", "Failed"})
_PICTURES = "samples"
_LOGS = "logs"


class ClusterBackend:
    """Runs as RayJobs."""

    name = "kubernetes"

    def check(self, plan: Plan, *, say: Say) -> None:
        """What launching would check, up to the server's own dry-run."""
        prepared = prepare(plan, entries=read_registry().entries, say=say)
        with connected(prepared.places) as connections:
            preflight(prepared.plan, prepared.objects, connections=connections)
        say(f"{sum(map(len, prepared.objects.values()))} objects would be accepted")

    def launch(self, plan: Plan, *, root: Path, say: Say) -> Run:
        return launch(prepare(plan, entries=read_registry().entries, say=say), root=root, say=say)

    def attach(self, run: Run) -> Attachment:
        return Watch(run)

    def cancel(self, run: Run, *, now: bool, timeout_seconds: float) -> str:
        """Remove every object of the run. What has ended already keeps its fate."""
        watch = Watch(run)
        try:
            return _cancel(run, watch, now=now, timeout_seconds=timeout_seconds)
        finally:
            watch.close()

    def resume(self, run: Run) -> None:
        raise RefusedError(
            f"run {run.name} is on clusters, where its own pods recover it",
            hint=f"`gkr why {run.name}` says what it waits for; `gkr launch FILE` starts a new run",
        )

    def ask_syncer(self, run: Run, *, path: str) -> bytes:
        from gkr.cluster.ask_syncer import ask_cluster_syncer

        return ask_cluster_syncer(run, path=path)


class Watch:
    """One run seen from here."""

    poll_seconds = 1.0

    def __init__(self, run: Run) -> None:
        self.run, self.places = run, read_places(run.path)
        self.plan = read_plan(run.path)
        self.connections: dict[str, Connection] = {name: connect(one) for name, one in self.places.clusters.items()}
        self._reasons = Reasons(self.plan, places=self.places, connections=self.connections)
        self._mirror: Mirror | None = None
        self._silent_since: float | None = None
        self._flush_until: float | None = None
        self._told: set[str] = set()

    def refresh(self) -> bool:
        """Events first, then what the objects say, so that the fate is the last line."""
        known = read_state(self.run.path)
        if known.status in FINAL:
            return False
        try:
            found = standing(self._reasons.improve(observe(self.places, self.connections)))
            self._fetch_events()
            self._silent_since = None
        except UnreachableError as error:
            self._wait_for(error)
            return True
        if found.status not in FINAL:
            note_standing(self.run.path, found)
            return True
        if known.status == "starting" and time.time() - self.run.created < CREATION_SECONDS:
            return True  # somebody is creating it just now
        if not self._flushed():
            return True
        note_standing(self.run.path, found)
        return False

    def logs(self) -> None:
        """Whole files: a log is one object that grows."""
        self._with_buckets(lambda mirror: mirror.files(_LOGS))

    def finish(self) -> None:
        """Fetch pictures and logs, fold the summary, draw the report."""
        if (self.run.path / "summary.json").exists() and (self.run.path / "report.html").exists():
            return
        self._with_buckets(lambda mirror: mirror.files(_PICTURES))
        self.logs()
        from gkr.conclusion import conclude

        conclude(self.run.path)

    def fetch(self) -> None:
        """Everything that the buckets have now."""
        self._fetch_events()
        self._with_buckets(lambda mirror: mirror.files(_PICTURES))
        self.logs()

    def publish(self, event: RunStatus) -> None:
        """Leave word in the bucket for others who watch the run."""
        self._with_buckets(lambda mirror: mirror.publish(event))

    def close(self) -> None:
        for one in self.connections.values():
            one.close()

    def _flushed(self) -> bool:
        """Pods ship their last lines when their job has ended already."""
        now = time.monotonic()
        if self._flush_until is None:
            self._flush_until = now + FLUSH_SECONDS
        return now >= self._flush_until or self._syncer_ended()

    def _syncer_ended(self) -> bool:
        """The last to write: it ends when all learners have left."""
        syncer = self.places.syncer
        if syncer is None:
            return False
        job = self.connections[syncer.cluster].find("Job", syncer.job, namespace=syncer.namespace)
        return job is None or _batch_job_ended(job)

    def _fetch_events(self) -> None:
        self._with_buckets(lambda mirror: mirror.events())

    def _with_buckets(self, act: Callable[[Mirror], object]) -> None:
        """A bucket that cannot be read from here costs the details, not the state: that is in the objects."""
        try:
            if self._mirror is None:
                self._mirror = Mirror(self.run.path, buckets=self._buckets())
            act(self._mirror)
        except (UnreachableError, RefusedError) as error:
            if error.message not in self._told:
                self._told.add(error.message)
                tell(f"no progress can be shown: {error}")

    def _buckets(self) -> Mapping[str, Bucket]:
        found: dict[str, Bucket] = {}
        for learner in self.plan.learners:
            if learner.run_uri not in found:
                found[learner.run_uri] = run_bucket(self.connections[learner.cluster], learner=learner)
        return found

    def _wait_for(self, error: UnreachableError) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            tell(f"{error}\n  the run is not touched; trying again for {PATIENCE_SECONDS / 60:g} minutes")
        if now - self._silent_since > PATIENCE_SECONDS:
            raise error


def _batch_job_ended(job: Object) -> bool:
    return any(one.get("status") == "True" for one in items(job, "status", "conditions") if one["type"] in _ENDED)


def _cancel(run: Run, watch: Watch, *, now: bool, timeout_seconds: float) -> str:
    before = read_state(run.path).status
    if before not in FINAL:
        states = observe(watch.places, watch.connections)
        if all(one.phase in {"succeeded", "failed"} for one in states.values()):  # nobody had looked since it ended
            watch.fetch()
            note_standing(run.path, standing(states))
            before = standing(states).status
    left = remove(watch.places, connections=watch.connections, now=now, timeout_seconds=timeout_seconds)
    if left:
        raise GkrError(
            f"run {run.name} is not gone {timeout_seconds:g} s after it was cancelled: {', '.join(left[:6])}",
            hint=f"`gkr cancel {run.name} --now` kills its pods; is KubeRay's operator running?",
        )
    watch.fetch()
    if before not in FINAL and read_state(run.path).status not in FINAL:
        event = status_event("cancelled", "gkr cancel", exit_code=EXIT_CANCELLED)
        watch.publish(event)
        with locked(run.path):
            append(run.path, [event])
    watch.finish()
    return read_state(run.path).status
