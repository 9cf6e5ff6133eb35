"""The driver of one learner: places agents and services through Ray, watches, recovers, reports.

    python -m training.driver --plan PLAN --learner NAME --run-dir DIR --events FILE --syncer-control H:P --syncer-bulk
    H:P --attempt N

It is never on the path of a step: it polls its agents a few times a second, feeds what it sees to `training.recovery`
and does what that answers. Everything it observes goes to the run's events, from which another driver can take up the
count of attempts. It has a Ray instance of its own; if it dies, Ray, agents, ranks and services die with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.util

from spec import events as ev
from spec.errors import EXIT_FAILED, DataError, GkrError, UnreachableError
from spec.plan import LearnerPlan, Plan
from spec.shards import open_manifest
from training.attempts import Attempts, previous_attempts
from training.evaluation import Evaluation
from training.event_log import EventLog
from training.recovery import NodesReady

log = logging.getLogger("driver")

POLL_SECONDS = 0.1
SERVICE_POLL_SECONDS = 1.0
PREPARE_DEADLINE_SECONDS = 600.0
PREFLIGHT_DEADLINE_SECONDS = 180.0
OBJECT_STORE_BYTES = 80 * 2**20
RAY_STARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    plan: Path
    learner: str
    run_dir: Path
    events: Path
    syncer_control: str
    syncer_bulk: str
    attempt: int

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs" / self.learner / str(self.attempt)


def main(arguments: list[str] | None = None) -> int:
    """Run the learner to its end; returns the exit code of the contract."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    out = EventLog(options.events, source=f"driver/{options.learner}")
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        plan = Plan.read_json(options.plan.read_text())
        return Driver(plan, options=options, out=out).run()
    except GkrError as error:
        log.exception("ended")
        out.emit(ev.Note, level="error", text=f"learner {options.learner}: {error}")
        return error.exit_code
    except Cancelled:
        return 103


class Cancelled(BaseException):
    """SIGTERM: the supervisor wants this driver to end in order."""


def _on_terminate(_number: int, _frame: object) -> None:
    raise Cancelled


class Driver:
    """Owns the Ray instance of one learner."""

    def __init__(self, plan: Plan, *, options: Options, out: EventLog) -> None:
        self.plan, self.options, self.out = plan, options, out
        self.learner: LearnerPlan = plan.learner(options.learner)
        self._ray_dir = Path(tempfile.mkdtemp(prefix="gkr-ray-", dir="/tmp"))

    def run(self) -> int:
        """Prepare, start, watch, end."""
        services = attempts = evaluation = None
        try:
            self._start_ray()
            # Agents import torch while the dataset is made: both are needed and neither waits for the other.
            attempts = Attempts(
                self.plan,
                options=self.options,
                out=self.out,
                history=previous_attempts(self.options.events, learner=self.learner.name),
            )
            attempts.start_agents()
            self._prepare()
            services = self._start_services()
            failed = attempts.preflight(deadline_seconds=PREFLIGHT_DEADLINE_SECONDS)
            evaluation = Evaluation.for_home(self.plan, options=self.options, out=self.out)
            return self._watch(attempts, services=services, evaluation=evaluation, failed=failed)
        finally:
            for part in (evaluation, attempts, services):
                if part is not None:
                    part.close()
            ray.shutdown()
            shutil.rmtree(self._ray_dir, ignore_errors=True)

    def _start_ray(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if os.environ.get("RAY_ADDRESS"):  # a Ray cluster is there already: this driver is its job
            ray.init(address="auto", log_to_driver=False, configure_logging=False, namespace=f"gkr-{self.plan.run}")
            return
        cpus = sum(node.cpu for node in self.learner.nodes) + sum(s.cpu * s.replicas for s in self.learner.services)
        nodes = {f"gkr_node_{node.name}": 1.0 for node in self.learner.nodes}
        for left in reversed(range(RAY_STARTS)):
            try:
                ray.init(
                    num_cpus=max(1, round(cpus + 0.5)),
                    num_gpus=0,
                    resources=nodes,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(self._ray_dir),
                    _node_ip_address="127.0.0.1",
                    log_to_driver=False,
                    configure_logging=False,
                    namespace=f"gkr-{self.plan.run}",
                )
            except Exception as error:
                # Ray gives its own processes a fixed 30 s and raises a bare Exception: too short on a machine that is
                # busy for a moment.
                ray.shutdown()
                if not left:
                    raise UnreachableError(
                        f"Ray did not start within {RAY_STARTS} tries: {error}",
                        hint=f"see {self._ray_dir}/session_latest/logs; is the machine overloaded?",
                    ) from error
                log.warning("Ray did not start, %d more tries: %s", left, error)
            else:
                return

    def _prepare(self) -> None:
        """Make the dataset if its manifest is missing and the plan says from what."""
        started = time.monotonic()
        try:
            manifest = open_manifest(self.learner.data_manifest)
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
        self._prepared(open_manifest(self.learner.data_manifest), started=started, reused=False)

    def _prepared(self, manifest: Any, *, started: float, reused: bool) -> None:
        samples = manifest.count("train") + manifest.count("test")
        self.out.emit(
            ev.Prepared,
            learner=self.learner.name,
            manifest=self.learner.data_manifest,
            samples=samples,
            seconds=time.monotonic() - started,
            reused=reused,
        )

    def _start_services(self) -> Any:
        from services.hosting import start_services

        return start_services(
            self.learner,
            manifest=self.learner.data_manifest,
            cache_dir=self.options.run_dir / "state" / "cache" / self.learner.name,
            log_dir=self.options.log_dir,
            bind_host=ray.util.get_node_ip_address(),
            reserve_cpus=bool(os.environ.get("RAY_ADDRESS")),
        )

    def _watch(
        self, attempts: Attempts, *, services: Any, evaluation: Evaluation | None, failed: tuple[str, ...]
    ) -> int:
        attempts.handle(NodesReady(failed))
        next_services = 0.0
        while attempts.finish is None:
            now = time.monotonic()
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


def _parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m training.driver", description="Drives one learner of a run.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--learner", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--syncer-control", default="")
    parser.add_argument("--syncer-bulk", default="")
    parser.add_argument("--attempt", type=int, default=1, help="which start of this driver")
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
