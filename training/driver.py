"""The driver of one learner: places agents and services through Ray, watches, recovers, reports.

    python -m training.driver --plan PLAN --learner NAME --run-dir DIR --events FILE --syncer-control H:P --syncer-bulk
    H:P --attempt N

It is never on the path of a step: it polls its agents a few times a second, feeds what it sees to `training.recovery`
and does what that answers. Everything it observes goes to the run's events, from which another driver can take up the
count of attempts. Where RAY_ADDRESS names a Ray cluster it is a job of that cluster and takes everything else from the
environment of its pod; else it has a Ray instance of its own. If it dies, agents, ranks and services die with it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import ray

from spec import events as ev
from spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_UNFINISHED, DataError, GkrError, UnreachableError
from spec.names import group_resource, service_resource
from spec.plan import LearnerPlan, Plan
from spec.shards import Manifest, open_manifest
from storage import file_path, open_bucket, split_uri
from training.attempts import Attempts, History, previous_attempts
from training.conclusion import publish_summary
from training.evaluation import Evaluation
from training.event_log import EventLog
from training.options import Options, parse
from training.recovery import NodesReady
from training.shipping import Outbox

log = logging.getLogger("driver")

POLL_SECONDS = 0.1
SERVICE_POLL_SECONDS = 1.0
PREPARE_DEADLINE_SECONDS = 600.0
PREFLIGHT_DEADLINE_SECONDS = 180.0
OWN_NODE_DEADLINE_SECONDS = 180.0
"""Longest wait for the agent that replaces a lost one on this machine; on a cluster it is `timeouts.start`, since a
pod, or a machine for it, must come first."""
LAST_SHIP_SECONDS = 20.0
OBJECT_STORE_BYTES = 80 * 2**20
RAY_STARTS = 3
RAY_FOLDERS = Path("/tmp")  # noqa: S108  (short, whatever TMPDIR says; what is in it is ours alone)


def main(arguments: list[str] | None = None) -> int:
    """Run the learner to its end; returns the exit code of the contract."""
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        options = parse(arguments)
        plan = Plan.read_json(options.plan.read_bytes())
        if options.events is not None:
            _log_to_stderr()
            return _drive(plan, options=options, out=EventLog(options.events, source=f"driver/{options.learner}"))
        return _drive_alone(plan, options=options)
    except GkrError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except Cancelled:
        return EXIT_CANCELLED


def _drive(plan: Plan, *, options: Options, out: EventLog, outbox: Outbox | None = None) -> int:
    try:
        return Driver(plan, options=options, out=out, outbox=outbox).run()
    except GkrError as error:
        log.exception("ended")
        out.emit(ev.Note, level="error", text=f"learner {options.learner}: {error}")
        return error.exit_code
    except Cancelled:
        return EXIT_CANCELLED


def _drive_alone(plan: Plan, *, options: Options) -> int:
    """Without a supervisor: events and log are this process's own, and what drivers before it did is in the bucket."""
    learner = plan.learner(options.learner)
    outbox = Outbox.open(
        open_bucket(learner.run_uri),
        source=f"driver-{learner.name}",
        folder=options.run_dir / "state" / f"events-{learner.name}",
        deadline_seconds=plan.timeouts.start,
    )
    attempt = options.attempt or previous_attempts(outbox.history, learner=learner.name).attempt + 1
    options = replace(
        options,
        attempt=attempt,
        syncer_control=options.syncer_control or learner.syncer_control,
        syncer_bulk=options.syncer_bulk or learner.syncer_bulk,
    )
    out = EventLog(outbox.path, source=f"driver/{learner.name}")
    with _own_log(options.log_dir / "driver-0.log") as say:
        try:
            code = _drive(plan, options=options, out=out, outbox=outbox)
        finally:
            if not outbox.close(deadline_seconds=LAST_SHIP_SECONDS):
                log.warning("events are not all in the bucket after %g s", LAST_SHIP_SECONDS)
        if not code and learner.name == plan.home.name:
            _conclude(plan)
        if code:  # Ray keeps the end of what a job prints: this line is what people read first
            say.write(f"{_last_error(outbox.path) or f'ended with code {code}'}\n".encode())
    return code


def _conclude(plan: Plan) -> None:
    """A summary that cannot be written does not undo a finished run: `gkr report` makes one from the events."""
    try:
        publish_summary(plan)
    except GkrError as error:
        log.warning("summary.json is not in the bucket: %s", error)


class Cancelled(BaseException):
    """SIGTERM: the supervisor wants this driver to end in order."""


def _on_terminate(_number: int, _frame: object) -> None:
    raise Cancelled


class Driver:
    """One learner from start to end."""

    def __init__(self, plan: Plan, *, options: Options, out: EventLog, outbox: Outbox | None = None) -> None:
        self.plan, self.options, self.out = plan, options, out
        self.learner: LearnerPlan = plan.learner(options.learner)
        self._outbox = outbox
        self._ray_dir = ray_folder(options.run_dir, learner=options.learner)
        self._joins = bool(os.environ.get("RAY_ADDRESS"))
        """There is a Ray cluster already, and this driver is its job."""

    def run(self) -> int:
        """Prepare, start, watch, end."""
        services = attempts = evaluation = None
        node_deadline = self.plan.timeouts.start if self._joins else OWN_NODE_DEADLINE_SECONDS
        try:
            self._start_ray()
            # Agents import torch while the dataset is made: both are needed and neither waits for the other.
            attempts = Attempts(
                self.plan,
                options=self.options,
                out=self.out,
                history=self._history(),
                node_deadline_seconds=node_deadline,
            )
            attempts.start_agents()
            if self.plan.train is not None:
                self._prepare()
            services = self._start_services(placement_seconds=node_deadline)
            attempts.await_agents(deadline_seconds=node_deadline)
            failed = attempts.preflight(deadline_seconds=PREFLIGHT_DEADLINE_SECONDS)
            evaluation = Evaluation.for_home(self.plan, options=self.options, out=self.out)
            return self._watch(attempts, services=services, evaluation=evaluation, failed=failed)
        finally:
            for part in (evaluation, attempts, services):
                if part is not None:
                    part.close()
            ray.shutdown()
            shutil.rmtree(self._ray_dir, ignore_errors=True)

    def _history(self) -> History:
        path = self.options.events or (self._outbox.history if self._outbox else None)
        return previous_attempts(path, learner=self.learner.name) if path else History()

    def _start_ray(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if not self._joins:
            # What the processes of a pod find in their environment; Ray's processes here inherit ours.
            os.environ["GKR_RUN_DIR"] = str(self.options.run_dir.absolute())
            os.environ["GKR_PLAN"] = str(self.options.plan.absolute())
        settings: dict[str, Any] = {"address": "auto"} if self._joins else self._own_ray()
        for left in reversed(range(RAY_STARTS)):
            try:
                ray.init(log_to_driver=False, configure_logging=False, namespace=f"gkr-{self.plan.run}", **settings)
            except Exception as error:
                # Ray gives its own processes a fixed 30 s and raises bare exceptions: too short on a machine that is
                # busy for a moment.
                ray.shutdown()
                if not left:
                    hint = "`gkr logs` shows its head's" if self._joins else f"see {self._ray_dir}/session_latest/logs"
                    raise UnreachableError(
                        f"Ray did not answer within {RAY_STARTS} tries: {error}",
                        hint=f"{hint}; is the machine overloaded?",
                    ) from error
                log.warning("Ray does not answer, %d more tries: %s", left, error)
            else:
                return

    def _own_ray(self) -> dict[str, Any]:
        cpus = sum(node.cpu for node in self.learner.nodes) + sum(s.cpu * s.replicas for s in self.learner.services)
        return {
            "address": "local",  # never one that somebody else left running on this machine
            "num_cpus": max(1, round(cpus + 0.5)),
            "num_gpus": 0,
            "resources": _resources(self.learner),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(self._ray_dir),
            "_node_ip_address": "127.0.0.1",
        }

    def _prepare(self) -> None:
        """Make the dataset if its manifest is missing and the plan says from what."""
        started = time.monotonic()
        try:
            manifest = self._manifest()
        except DataError:
            if self.learner.data_source is None:
                raise
        else:
            self._prepared(manifest, started=started, reused=True)
            return
        self.options.log_dir.mkdir(parents=True, exist_ok=True)
        path = self.options.log_dir / "prepare-0.log"
        command = [
            sys.executable,
            "-m",
            "services.prepare",
            "--source",
            self.learner.data_source,
            "--manifest",
            self.learner.data_manifest,
        ]
        with path.open("ab") as file:
            done = subprocess.run(command, stdout=file, stderr=file, check=False, timeout=PREPARE_DEADLINE_SECONDS)
        if done.returncode:
            tail = path.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise DataError(f"preparing {self.learner.data_manifest} failed: {tail[0]}", hint=f"see {path}")
        self._prepared(self._manifest(), started=started, reused=False)

    def _manifest(self) -> Manifest:
        """Only the manifest: the shards are for those who train."""
        uri = self.learner.data_manifest
        if file_path(uri) is not None:
            return open_manifest(uri)
        folder, name = split_uri(uri)
        path = self.options.run_dir / "state" / f"manifest-{self.learner.name}.json"
        open_bucket(folder).fetch(name, path)
        return open_manifest(path.absolute().as_uri())

    def _prepared(self, manifest: Manifest, *, started: float, reused: bool) -> None:
        samples = manifest.count("train") + manifest.count("test")
        self.out.emit(
            ev.Prepared,
            learner=self.learner.name,
            manifest=self.learner.data_manifest,
            samples=samples,
            seconds=time.monotonic() - started,
            reused=reused,
        )

    def _start_services(self, *, placement_seconds: float) -> Any:
        from services.hosting import start_services

        return start_services(
            self.learner,
            manifest=self.learner.data_manifest,
            shape=train.model.sample_shape if (train := self.plan.train) is not None else (),
            cache_dir=f"state/cache/{self.learner.name}",
            log_dir=self.options.log_folder,
            placement_seconds=placement_seconds,
        )

    def _watch(
        self, attempts: Attempts, *, services: Any, evaluation: Evaluation | None, failed: tuple[str, ...]
    ) -> int:
        attempts.handle(NodesReady(failed))
        next_services = 0.0
        while attempts.finish is None:
            now = time.monotonic()
            if self._outbox is not None and self._outbox.taken_over:
                log.warning("a newer driver of %s is there; ending", self.learner.name)
                return EXIT_UNFINISHED
            if now >= next_services:
                self._poll_services(services, attempts=attempts)
                next_services = now + SERVICE_POLL_SECONDS
            attempts.poll()
            time.sleep(POLL_SECONDS)
        code, reason = attempts.finish.exit_code, attempts.finish.reason
        if code == 0 and evaluation is not None:
            while not evaluation.finished():  # bounded by the deadlines inside
                self._poll_services(services, attempts=attempts)
                time.sleep(POLL_SECONDS)
            problem = evaluation.problem()
            if problem is not None:
                code, reason = EXIT_FAILED, f"final evaluation failed: {problem}"
        if code:
            self.out.emit(ev.Note, level="error", text=f"learner {self.learner.name}: {reason}")
        log.info("end: %s (%s)", code, reason)
        return code

    def _poll_services(self, services: Any, *, attempts: Attempts) -> None:
        result = services.poll(deadline_seconds=0.5)
        for stats in result.stats:
            self.out.emit(ev.ServiceStats, **{"learner": self.learner.name, **stats})
        attempts.set_directory(result.directory)
        attempts.hold(result.unplaced)
        for death in result.deaths:
            self.out.emit(
                ev.Recovery,
                learner=self.learner.name,
                what=f"service {death.service}-{death.index}",
                cause=death.cause,
                action="restarted" if death.restarted else "given up",
                detected_seconds=death.detected_seconds,
            )
            serving = any(replica.service == death.service for replica in result.directory.replicas)
            if not death.restarted and not serving and f"{death.service}-{death.index}" in result.failed:
                raise GkrError(
                    f"service {death.service} keeps failing: {death.cause}",
                    hint=f"see {self.options.log_dir}/service-{death.service}-*.log",
                )


def ray_folder(run_dir: Path, *, learner: str) -> Path:
    """A new folder for a Ray of our own, in a short path as its sockets need. What earlier drivers of this learner left
    goes: those that were killed could not remove theirs.
    """
    place = hashlib.sha256(f"{run_dir.absolute()}/{learner}".encode()).hexdigest()[:8]
    for left in RAY_FOLDERS.glob(f"gkr-ray-{place}-*"):
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"gkr-ray-{place}-", dir=RAY_FOLDERS))


def _resources(learner: LearnerPlan) -> dict[str, float]:
    """What the pods of a cluster offer one by one, offered by this machine alone."""
    groups = {group_resource(group): float(len(learner.group(group))) for group in learner.groups}

    return {**groups, **{service_resource(one.name): float(one.replicas) for one in learner.services}}


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)


@contextmanager
def _own_log(path: Path) -> Generator[BinaryIO]:
    """Send what this process prints to a log of the run; yields where it went before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.dup(2), "wb", buffering=0) as former, path.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
        _log_to_stderr()
        try:
            yield former
        finally:  # an error of ours that ends this process shows up where people look first
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(former.fileno(), stream.fileno())


def _last_error(path: Path) -> str:
    """What the driver said last about its end, in one line."""
    said = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        for event in ev.read_events(file):
            if isinstance(event, ev.Note) and event.level == "error":
                said = " ".join(event.text.split())
    return said


if __name__ == "__main__":
    sys.exit(main())
