"""Starts, watches and restarts the replicas of one learner's services as Ray actors. The only module here with Ray.

Ray places the processes and tells when one is gone; requests never pass through it. Restarts are ours, not Ray's, so
that each one is counted, gets a new incarnation and is published only after its service answered a real request. A
replica that dies three times without serving a request in between is not restarted again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.util
from ray.exceptions import RayError

from services.metrics import ReplicaMetrics, serve_metrics
from services.registry import CLASSES, load_class
from services.server import Server
from services.service import ServiceContext
from services.stats import ServerStats
from services.wire.seal import run_secret
from spec.errors import ConfigError, GkrError, UnreachableError
from spec.names import service_resource
from spec.plan import LearnerPlan, ServicePlan
from spec.service_placement import queue_budget
from spec.services import METRICS_PORT, Directory, Replica, ServiceKind
from spec.sync_keys import SHARED_ENVIRONMENT, SyncKeys

_log = logging.getLogger(__name__)

MAX_FRUITLESS_STARTS = 3
LONGEST_BATCH_SECONDS = 1800.0
"""A replica that computes one batch for longer is taken for hung. Until then busy is healthy."""
_HUNG_SECONDS = 60.0
_START_SECONDS = 300.0
_STATS_SECONDS = 30.0
_SCRAPE_SECONDS = 5.0
"""Of one look at the metrics: less than the ten that a monitor gives it."""
_JOIN_SECONDS = 1.0

REPLICA_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Set before a replica imports torch: nothing is downloaded, and replicas that share a machine do not fight for it."""


@dataclass(frozen=True)
class ReplicaDeath:
    """A replica that was serving or starting and is gone."""

    service: str
    index: int
    cause: str
    detected_monotonic: float
    detected_seconds: float
    """At most so long after it died: since its last sign of life."""
    restarted: bool
    """False: the restart budget is used up, or starting again cannot help; the service goes on with the others."""


@dataclass(frozen=True)
class PollResult:
    """What the host saw in one look."""

    directory: Directory
    stats: list[dict[str, Any]]
    """One per replica that answered in time: what `spec.events.ServiceStats` tells of it, and more that it ignores.
    Counters start again with each incarnation."""
    deaths: list[ReplicaDeath]
    failed: dict[str, str]
    """`service-index` to the cause, of replicas that are not restarted any more."""
    starting: list[str] = field(default_factory=list[str])
    """`service-index` of replicas that are not ready yet."""
    unplaced: list[str] = field(default_factory=list[str])
    """`service-index` of those that have no machine yet."""


class _Started(NamedTuple):
    endpoint: str
    pid: int
    sealed: bool
    metrics: str
    refusal: str
    """Non-empty: a GkrError that starting again will not mend."""


class _ReplicaActor:
    """Runs in the replica's process."""

    def __init__(self, log_path: str) -> None:
        _redirect_output(run_folder() / log_path)
        os.environ.update(REPLICA_ENVIRONMENT)
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s"
        )
        self._server: Server | None = None

    def greet(self) -> str:
        """Where it was placed: the first call."""
        return str(ray.util.get_node_ip_address())

    def start(
        self, *, path: str, context: ServiceContext, plan: ServicePlan, incarnation: int, port: int | None
    ) -> _Started:
        """Load the service, prove that it answers, and listen on this node's own address, where clients of other nodes
        reach it. It hears those of its run, if the run has keys; else all whom the network lets through. Without a port
        it takes a free one. Raises what another start may mend, such as a port that its predecessor still has."""
        context = replace(context, cache_dir=run_folder() / context.cache_dir)
        try:
            secret = _secret(plan)
            service = load_class(path)(context)
            service.warm_up()
        except GkrError as error:
            logging.getLogger(__name__).error("%s cannot start: %s", context.name, error)  # noqa: TRY400 - our wording
            return _Started("", os.getpid(), sealed=False, metrics="", refusal=str(error))
        server = Server(
            service,
            queue_depth=plan.queue_depth,
            queue_bytes=plan.queue_bytes,
            budget_bytes=queue_budget(plan.memory) if plan.queue_bytes else 0,
            max_delay_seconds=plan.max_delay_ms / 1000,
            incarnation=incarnation,
            bind=f"tcp://{self.greet()}:{'*' if port is None else port}",
            secret=secret,
        )
        endpoint = server.start()
        self._server = server
        metrics = self._serve_metrics(context.name)
        logging.getLogger(__name__).info("%s serves on %s, incarnation %d", context.name, endpoint, incarnation)
        return _Started(endpoint, os.getpid(), sealed=bool(secret), metrics=metrics, refusal="")

    def _serve_metrics(self, service: str) -> str:
        """Where they are; nowhere if the port is taken, for which a service that works does not stop."""
        port = int(os.environ.get(METRICS_PORT, "0"))
        metrics = ReplicaMetrics(service, stats=lambda: self._counters(timeout_seconds=_SCRAPE_SECONDS))
        try:
            return serve_metrics(metrics, address=self.greet(), port=port)
        except OSError as error:
            logging.getLogger(__name__).warning("no metrics on port %d: %s", port, error)
            return ""

    def _counters(self, *, timeout_seconds: float) -> ServerStats:
        assert self._server is not None
        return self._server.stats(timeout_seconds=timeout_seconds)

    def stats(self) -> dict[str, Any] | None:
        """Counters, none before `start` is done. Raises if the server's loop does not turn."""
        if self._server is None:
            return None
        stats = self._counters(timeout_seconds=_STATS_SECONDS)
        if stats.computing_seconds > LONGEST_BATCH_SECONDS:
            faulthandler.dump_traceback(file=sys.stderr)  # where it hangs, for the log: it is ended next
        return asdict(stats)

    def stop(self, deadline_seconds: float) -> None:
        """Send the clients away."""
        if self._server is not None:
            self._server.stop(deadline_seconds=deadline_seconds)


def _secret(plan: ServicePlan) -> bytes:
    """The run's; of a platform's replica the platform's, without which it must not serve. Raises ConfigError."""
    if not plan.shared_secret:
        return run_secret(SyncKeys.read())
    keys = SyncKeys.read(variable=SHARED_ENVIRONMENT)
    if keys is None:
        text = f"service {plan.name} proves itself by the token in Secret {plan.shared_secret}, which is not here"
        raise ConfigError(text, hint=f"its pod must mount it and name the folder in {SHARED_ENVIRONMENT}")
    return run_secret(keys)


def run_folder() -> Path:
    """The run's folder on the machine of this process."""
    return Path(os.environ.get("GKR_RUN_DIR", "."))


def _redirect_output(path: Path) -> None:
    """What this process and its libraries print goes to the run's log, not to Ray's session folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


@dataclass
class _Slot:
    """One replica over all its starts."""

    plan: ServicePlan
    index: int
    log_path: str
    port: int | None = None
    """Where each of its starts listens; None: wherever there is room."""
    incarnation: int = 0
    actor: Any = None
    placing: Any = None
    """Reference to the first call, until the replica has a machine."""
    starting: Any = None
    """Reference to the running `start`, until it is done."""
    looking: Any = None
    """Reference to the running `stats`, if one is."""
    looked_at: float = 0.0
    launched_at: float = 0.0
    alive_at: float = 0.0
    replica: Replica | None = None
    served: bool = False
    """This incarnation answered at least one request."""
    fruitless: int = 0
    failure: str = ""

    @property
    def label(self) -> str:
        return f"{self.plan.name}-{self.index}"


class ServiceHosts:
    """All replicas of one learner. `poll` often: it is what notices deaths, and the restart begins there."""

    def __init__(
        self,
        learner: LearnerPlan,
        *,
        manifest: str,
        shape: tuple[int, ...],
        cache_dir: str,
        log_dir: str,
        placement_seconds: float,
        classes: Mapping[ServiceKind, str],
        first_port: int | None = None,
    ) -> None:
        self._learner = learner.name
        self._manifest, self._shape = manifest, shape
        self._cache_dir = cache_dir
        self._placement_seconds = placement_seconds
        self._classes = classes
        # Numbers only grow, also from one driver of this learner to the next: both begin at the clock.
        self._epoch = self._last_incarnation = time.time_ns() // 1_000_000
        self._shared = [
            Replica(
                service=plan.name,
                kind=plan.kind,
                index=index,
                endpoint=endpoint,
                incarnation=0,
                sealed=bool(plan.shared_secret),
                shared=True,
                answers_to=plan.answers_to,
            )
            for plan in learner.services
            for index, endpoint in enumerate(plan.shared_endpoints)
        ]
        self._slots = [
            _Slot(plan, index, f"{log_dir}/service-{plan.name}-{index}.log")
            for plan in learner.services
            if not plan.shared_endpoints
            for index in range(plan.replicas)
        ]
        if first_port is not None:
            for place, slot in enumerate(self._slots):
                slot.port = first_port + place
        self._closed = False
        for slot in self._slots:
            self._launch(slot)

    def poll(self, deadline_seconds: float, *, patient: bool = False) -> PollResult:
        """Look at every replica, for at most that long. Never raises for a replica that is dead or does not start.

        Returns as soon as those that serve have answered; a patient caller also waits for one that is starting.
        """
        if self._closed:
            return PollResult(self._directory(), [], [], {})
        for slot in self._slots:
            if slot.replica is not None and slot.looking is None:
                slot.looking = slot.actor.stats.remote()
                slot.looked_at = time.monotonic()
        limit = time.monotonic() + deadline_seconds
        ready = _ready([slot.looking for slot in self._slots], seconds=deadline_seconds)
        left = max(0.0, limit - time.monotonic())
        ready |= _ready([slot.starting for slot in self._slots], seconds=left if patient else 0, any_one=True)
        placed = _ready([slot.placing for slot in self._slots], seconds=0)
        stats: list[dict[str, Any]] = []
        deaths: list[ReplicaDeath] = []
        for slot in self._slots:
            if slot.placing in placed:  # its start counts from here
                slot.placing, slot.launched_at = None, time.monotonic()
            try:
                if slot.starting in ready:
                    self._take_start(slot)
                elif slot.looking in ready:
                    stats.append(self._take_stats(slot))
                else:
                    _check_progress(slot, placement_seconds=self._placement_seconds)
            except _Unfit as unfit:
                deaths.append(self._dead(slot, cause=str(unfit), hopeless=unfit.hopeless))
            except RayError as error:
                deaths.append(self._dead(slot, cause=_cause(error)))
        return PollResult(
            directory=self._directory(),
            stats=stats,
            deaths=deaths,
            failed={slot.label: slot.failure for slot in self._slots if slot.failure},
            starting=[slot.label for slot in self._slots if slot.starting is not None],
            unplaced=[slot.label for slot in self._slots if slot.placing is not None],
        )

    def close(self, *, deadline_seconds: float = 5.0) -> None:
        """End all replicas: politely until the deadline, then at once."""
        if self._closed:
            return
        self._closed = True
        stopping = [slot.actor.stop.remote(deadline_seconds) for slot in self._slots if slot.replica is not None]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=deadline_seconds)
        for slot in self._slots:
            slot.replica = slot.placing = slot.starting = slot.looking = None
            if slot.actor is not None:
                ray.kill(slot.actor)
                slot.actor = None

    def _directory(self) -> Directory:
        own = [slot.replica for slot in self._slots if slot.replica is not None]
        return Directory(epoch=self._epoch, replicas=[*self._shared, *own])

    def _launch(self, slot: _Slot) -> None:
        """Begin to start a replica; Ray does the rest in the background."""
        self._last_incarnation += 1
        slot.incarnation = self._last_incarnation
        slot.served = False
        slot.launched_at = slot.alive_at = time.monotonic()
        actor_class: Any = ray.remote(_ReplicaActor)
        options: dict[str, Any] = {
            "name": f"service-{self._learner}-{slot.label}-{slot.incarnation}",
            "num_cpus": 0,  # its resource says where it may be; cores were counted when the run was planned
            "num_gpus": slot.plan.gpus,
            "resources": {service_resource(slot.plan.name): 1},
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 4,  # `stats` answers while `start` runs
        }
        slot.actor = actor_class.options(**options).remote(slot.log_path)
        slot.placing = slot.actor.greet.remote()
        slot.starting = slot.actor.start.remote(
            path=self._classes[slot.plan.kind],
            context=ServiceContext(
                kind=slot.plan.kind,
                name=slot.plan.answers_to or slot.plan.name,
                cache_dir=Path(self._cache_dir),
                manifest=self._manifest,
                max_batch=slot.plan.max_batch,
                model=slot.plan.model,
                shape=self._shape,
            ),
            plan=slot.plan,
            incarnation=slot.incarnation,
            port=slot.port,
        )

    def _take_start(self, slot: _Slot) -> None:
        started: _Started = ray.get(slot.starting, timeout=_STATS_SECONDS)
        slot.starting = None
        if started.refusal:
            raise _Unfit(started.refusal, hopeless=True)
        slot.alive_at = time.monotonic()
        slot.replica = Replica(
            service=slot.plan.name,
            kind=slot.plan.kind,
            index=slot.index,
            endpoint=started.endpoint,
            incarnation=slot.incarnation,
            pid=started.pid,
            sealed=started.sealed,
            metrics=started.metrics,
        )
        self._epoch += 1

    def _take_stats(self, slot: _Slot) -> dict[str, Any]:
        counters: dict[str, Any] = ray.get(slot.looking, timeout=_STATS_SECONDS)
        slot.looking = None
        if counters["computing_seconds"] > LONGEST_BATCH_SECONDS:
            raise _Unfit(f"one batch is being computed for {counters['computing_seconds']:.0f} s; its log says where")
        slot.alive_at = time.monotonic()
        if counters["requests"]:
            slot.served, slot.fruitless = True, 0
        return {
            "learner": self._learner,
            "service": slot.plan.name,
            "replica": slot.index,
            "incarnation": slot.incarnation,
            **counters,
        }

    def _dead(self, slot: _Slot, *, cause: str, hopeless: bool = False) -> ReplicaDeath:
        """Count a death, and start the successor unless that is pointless."""
        detected = time.monotonic()
        silent = detected - slot.alive_at
        if slot.replica is not None:
            self._epoch += 1
        ray.kill(slot.actor)  # what is left of it: a hung process, or one whose start failed
        slot.replica = slot.placing = slot.starting = slot.looking = slot.actor = None
        slot.fruitless += not slot.served
        restart = not hopeless and slot.fruitless <= MAX_FRUITLESS_STARTS
        if restart:
            _log.warning("service %s is gone (%s); starting it again", slot.label, cause)
            self._launch(slot)
        else:
            tries = "" if hopeless else f"; it was started {slot.fruitless} times without serving a request"
            slot.failure = f"{cause}{tries}; see {slot.log_path}"
            _log.error("service %s failed: %s", slot.label, slot.failure)
        return ReplicaDeath(slot.plan.name, slot.index, cause, detected, silent, restart)


class _Unfit(Exception):  # noqa: N818 - a verdict on a replica
    """A replica that must go although its process is there."""

    def __init__(self, cause: str, *, hopeless: bool = False) -> None:
        super().__init__(cause)
        self.hopeless = hopeless
        """Starting it again would end the same way: its configuration is refused."""


def _ready(references: list[Any], *, seconds: float, any_one: bool = False) -> set[Any]:
    waiting = [reference for reference in references if reference is not None]
    if not waiting:
        return set()
    return set(ray.wait(waiting, num_returns=1 if any_one else len(waiting), timeout=seconds)[0])


def _check_progress(slot: _Slot, *, placement_seconds: float) -> None:
    """Busy is healthy; no sign of life for long is not."""
    now = time.monotonic()
    if slot.placing is not None:
        if now - slot.launched_at > placement_seconds:
            raise _Unfit(f"no machine for it {placement_seconds:g} s after it was asked for")
        return
    if slot.starting is not None and now - slot.launched_at > _START_SECONDS:
        raise _Unfit(f"not ready {_START_SECONDS:g} s after its start")
    if slot.looking is not None and now - slot.looked_at > _HUNG_SECONDS:
        raise _Unfit(f"no sign of life for {_HUNG_SECONDS:g} s")


def _cause(error: RayError) -> str:
    """One line: an exception of the replica by its own words, anything else as the loss of the process."""
    inner = getattr(error, "cause", None)
    if inner is not None:
        return f"{type(inner).__name__}: {inner}".splitlines()[0]
    return f"process gone (killed or crashed): {type(error).__name__}"


def start_services(
    learner: LearnerPlan,
    *,
    manifest: str,
    shape: tuple[int, ...] = (),
    cache_dir: str,
    log_dir: str,
    placement_seconds: float = _START_SECONDS,
    classes: Mapping[ServiceKind, str] = CLASSES,
    first_port: int | None = None,
) -> ServiceHosts:
    """Begin to start all replicas of a learner; returns at once, `poll` tells when each is ready.

    `shape`: (height, width, channels) of the experiment's images, if it has some.
    Needs an initialised Ray whose nodes offer `gkr_service_<name>`. Folders are relative to the run's folder of the
    machine that a replica gets (GKR_RUN_DIR), for which it may wait `placement_seconds`. GPUs are reserved. With
    `first_port` the replicas listen there and on the ports that follow, in the plan's order, instead of where there is
    room: for services that clients find by an address that was known before.
    """
    return ServiceHosts(
        learner,
        manifest=manifest,
        shape=shape,
        cache_dir=cache_dir,
        log_dir=log_dir,
        placement_seconds=placement_seconds,
        classes=classes,
        first_port=first_port,
    )


def join_ray(address: str, *, deadline_seconds: float) -> None:
    """Join the Ray instance at HOST:PORT, which may still be starting. Raises UnreachableError at the deadline."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    host, _, port = address.rpartition(":")
    limit = time.monotonic() + deadline_seconds
    while True:  # Ray's own patience with an address that nobody listens at is a minute and more
        try:
            with socket.create_connection((host, int(port)), timeout=_JOIN_SECONDS):
                break
        except OSError as error:
            if time.monotonic() > limit:
                raise UnreachableError(f"no Ray at {address} within {deadline_seconds:g} s: {error}") from error
            time.sleep(_JOIN_SECONDS)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="services")
    except (ConnectionError, RayError, RuntimeError) as error:
        raise UnreachableError(f"Ray at {address} cannot be joined: {error}") from error


def leave_ray() -> None:
    """Leave it again; actors of this process end."""
    ray.shutdown()
