"""A syncer and learners as plain processes of this machine: what a run is without Ray, drivers, services and preflight.

For measurements and fault campaigns, where the learners are many, small, and killed on purpose. The trainer and the
syncer are the real ones. Learners are forked from one warm process, so that a restart costs no import. Whoever is
killed, or was silent for so long that the syncer fenced it, is started again, as a driver would; any other end of a
process is an error of the run. The events are those of a run, so `spec.fold` gives ledger and agreement.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from services.prepare.__main__ import prepare
from spec import events as ev
from spec.errors import EXIT_REFUSED
from spec.experiment import DataSource
from spec.link import LinkConfig
from spec.plan import LearnerPlan, NodePlan, Plan, SyncerPlan
from spec.sync import SyncConfig
from spec.train import TrainConfig
from training.context import RuntimeContext
from training.event_log import EventLog
from training.processes import die_with_parent, free_port
from training.progress import NOT_RESTORED, Page, read_page

ROOT = Path(__file__).resolve().parent.parent
END_SECONDS = 20.0
TICK_SECONDS = 0.02
_RESTARTED = (-signal.SIGKILL, EXIT_REFUSED)
"""Ends of a rank after which a driver starts its learner again: a kill; the syncer has given it up for its silence."""


def make_plan(
    folder: Path, *, learners: dict[str, int], train: TrainConfig, sync: SyncConfig, source: DataSource,
    links: dict[str, LinkConfig] | None = None,
) -> Plan:  # fmt: skip
    """A plan of `learners` (name to ranks) on this machine; makes the dataset once beside the runs."""
    manifest = (folder.parent / f"data-{source}" / "manifest.json").as_uri()
    prepare(manifest, source=source, shard_samples=256, lock_timeout_seconds=120)
    placed = [
        place_learner(
            name, ranks=ranks, data=manifest, checkpoints=(folder / "checkpoints" / name).as_uri(),
            run_uri=folder.as_uri(), cluster=f"local-{index}", link=(links or {}).get(name),
        )
        for index, (name, ranks) in enumerate(learners.items())
    ]  # fmt: skip
    syncer = SyncerPlan(
        cluster="local-0", control_port=free_port(), bulk_port=free_port(), store=(folder / "sync").as_uri(),
        config=sync, target_samples=train.samples, round_samples=sync.inner_steps * train.batch,
    )  # fmt: skip
    return Plan(experiment="fleet", run=folder.name, backend="local", learners=placed, train=train, syncer=syncer)


def place_learner(
    name: str, *, ranks: int, data: str, checkpoints: str, run_uri: str, cluster: str = "local-0",
    link: LinkConfig | None = None,
) -> LearnerPlan:  # fmt: skip
    """A learner of one node of this machine."""
    node = NodePlan(name="n0", group="t", machine="local-cpu", ranks=ranks, cpu=1, memory=2**30, shm=2**20)
    return LearnerPlan(
        name=name, cluster=cluster, region=cluster, gpu=None, world_size=ranks, nodes=[node], data_manifest=data,
        checkpoints=checkpoints, run_uri=run_uri, link=link,
    )  # fmt: skip


def start_syncer(
    folder: Path, *, endpoints: Path, until_final: bool = True, program: Sequence[str] = ("-m", "training.sync.server")
) -> subprocess.Popen[bytes]:
    """The syncer of the plan in a run's folder, on the plan's ports. `program`: what Python runs in its place."""
    command = [
        sys.executable, *program, "--plan", str(folder / "plan.json"), "--endpoints", str(endpoints),
        "--events", str(folder / "events.jsonl"), *["--until-final"] * until_final,
    ]  # fmt: skip
    environment = {**os.environ, "GKR_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "syncer.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log, env=environment)


def rank_contexts(
    plan: Path, learner: LearnerPlan, *, node_dir: Path, attempt: int, control: str, bulk: str, position: int
) -> list[RuntimeContext]:
    """What the ranks of one attempt of a learner find in their environment."""
    port = free_port()
    return [
        RuntimeContext(
            plan=str(plan), learner=learner.name, node="n0", node_dir=str(node_dir), rank=rank, local_rank=rank,
            world_size=learner.world_size, attempt=attempt, epoch=attempt, master_addr="127.0.0.1", master_port=port,
            syncer_control=control, syncer_bulk=bulk, last_position=position,
        )
        for rank in range(learner.world_size)
    ]  # fmt: skip


@dataclass
class Learner:
    """One learner's processes, over all its attempts."""

    plan: LearnerPlan
    control: str
    bulk: str
    attempt: int = 0
    position: int = 0
    processes: list[ForkServerProcess] = field(default_factory=list[ForkServerProcess])
    finished: bool = False


class Fleet:
    """All processes of one run. One thread only calls it; `poll` must be called often, it restarts what died."""

    def __init__(self, plan: Plan, *, folder: Path, pace_seconds: float = 0.0) -> None:
        """`pace_seconds`: least time from one step's begin to the next one's, so that few cores carry many learners."""
        assert plan.syncer is not None
        self.plan, self.folder, self._pace = plan, folder, pace_seconds
        folder.mkdir(parents=True, exist_ok=True)
        self._plan_path = folder / "plan.json"
        self._plan_path.write_text(plan.write_json())
        self._events = EventLog(folder / "events.jsonl", source="fleet")
        self._stack = ExitStack()
        self._control, self._bulk = f"127.0.0.1:{plan.syncer.control_port}", f"127.0.0.1:{plan.syncer.bulk_port}"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["training.trainer", "training.rank", "torch._dynamo", "tools.fleet"])
        self.learners: dict[str, Learner] = {}
        self.syncer: subprocess.Popen[bytes] | None = None
        self.syncer_done = False

    @contextmanager
    def running(self) -> Generator[Fleet]:
        """Everything started; everything ended behind it."""
        with self._stack:
            self._stack.callback(self._end)
            self._start_syncer()
            for one in self.plan.learners:
                control, bulk = self._link(one)
                self.learners[one.name] = Learner(one, control, bulk)
                self._start_learner(self.learners[one.name])
            yield self

    @property
    def finished(self) -> bool:
        """All learners and the syncer have ended in order."""
        return self.syncer_done and all(one.finished for one in self.learners.values())

    def poll(self) -> None:
        """Take note of what ended, and start again what was killed."""
        assert self.syncer is not None
        if self.finished:
            return
        code = self.syncer.poll()
        if code == -signal.SIGKILL:
            self._start_syncer()
        elif code is not None and not self.syncer_done:
            assert code == 0, f"the syncer ended with {code}: {self._tail('syncer.log')}"
            self.syncer_done = True
        for one in self.learners.values():
            if not one.finished:
                self._look(one)

    def signal_learner(self, name: str, number: signal.Signals) -> list[int]:
        """To all ranks of a learner that still live, which are given back."""
        living = [one.pid for one in self.learners[name].processes if one.exitcode is None and one.pid is not None]
        reached: list[int] = []
        for pid in living:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, number)
                reached.append(pid)
        return reached

    def kill_syncer(self) -> bool:
        """SIGKILL, if there is one; `poll` starts another."""
        assert self.syncer is not None
        if self.syncer.poll() is not None:
            return False
        self.syncer.kill()
        return True

    def page(self, name: str) -> Page | None:
        """Where rank 0 of a learner is."""
        return read_page(self._node(name) / "progress-0.page")

    def events(self) -> list[ev.Event]:
        """Of all writers so far, by time."""
        files = [self.folder / "events.jsonl", *sorted(self.folder.glob("nodes/*/events-*.jsonl"))]
        lines = [line for path in files for line in path.read_text().splitlines()]
        return sorted(ev.read_events(lines), key=lambda one: one.time)

    def standing(self) -> dict[str, str]:
        """A word for each learner, for an error's text."""
        return {name: f"{page.phase} at step {page.step}" if (page := self.page(name)) else "no page"
                for name in self.learners}  # fmt: skip

    # --- inside

    def _node(self, name: str) -> Path:
        return self.folder / "nodes" / name

    def _start_syncer(self) -> None:
        ready = self.folder / "endpoints.json"
        ready.unlink(missing_ok=True)
        self.syncer = start_syncer(self.folder, endpoints=ready)
        self.syncer_done = False

    def _link(self, learner: LearnerPlan) -> tuple[str, str]:
        """The addresses at which this learner finds the syncer: behind its link, if the plan gives it one."""
        if learner.link is None:
            return self._control, self._bulk
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        targets = (self._control, self._bulk)
        ports = [word for one, target in zip(listeners, targets, strict=True)
                 for word in ("--port", str(one.fileno()), target)]  # fmt: skip
        command = [
            sys.executable, "-m", "gkr.local.link", "--plan", str(self._plan_path), "--learner", learner.name,
            "--started", str(time.monotonic()), *ports,
        ]  # fmt: skip
        with (self.folder / f"link-{learner.name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, pass_fds=[one.fileno() for one in listeners]
            )
        self._stack.callback(process.wait, END_SECONDS)
        self._stack.callback(process.kill)
        control, bulk = (f"127.0.0.1:{one.getsockname()[1]}" for one in listeners)
        for one in listeners:
            one.close()
        return control, bulk

    def _start_learner(self, one: Learner) -> None:
        one.attempt += 1
        node = self._node(one.plan.name)
        node.mkdir(parents=True, exist_ok=True)
        one.processes = []
        contexts = rank_contexts(
            self._plan_path, one.plan, node_dir=node, attempt=one.attempt, control=one.control, bulk=one.bulk,
            position=one.position,
        )  # fmt: skip
        for context in contexts:
            log = str(node / f"rank-{context.rank}.log")
            process = self._context.Process(target=_run_rank, args=(context.to_environment(), log, self._pace))
            process.start()
            one.processes.append(process)
        pids = {f"rank-{rank}": process.pid for rank, process in enumerate(one.processes)}
        self._events.emit(
            ev.AttemptStarted, learner=one.plan.name, attempt=one.attempt, epoch=one.attempt,
            world_size=one.plan.world_size, pids=pids,
        )  # fmt: skip

    def _look(self, one: Learner) -> None:
        codes = [process.exitcode for process in one.processes]
        if any(code is None for code in codes):
            if any(codes):  # one rank is gone: the others cannot go on without it
                self.signal_learner(one.plan.name, signal.SIGKILL)
            return
        finished = not any(codes)
        if not finished and not any(code in _RESTARTED for code in codes):
            raise AssertionError(
                f"learner {one.plan.name} ended with {codes}: {self._tail(f'nodes/{one.plan.name}/rank-0.log')}"
            )
        page = self.page(one.plan.name)
        ran = page is not None and page.epoch == one.attempt and page.position != NOT_RESTORED
        one.position = page.position if page is not None and ran else one.position
        self._events.emit(
            ev.AttemptEnded, learner=one.plan.name, attempt=one.attempt, cause="finished" if finished else "killed",
            samples_run=page.samples_run if page is not None and ran else 0, position=one.position,
        )  # fmt: skip
        one.finished = finished
        if not finished:
            self._start_learner(one)

    def _tail(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace")[-3000:] if path.exists() else "it wrote no log"

    def _end(self) -> None:
        for name, one in self.learners.items():
            self.signal_learner(name, signal.SIGKILL)
            for process in one.processes:
                process.join(END_SECONDS)
        if self.syncer is not None and self.syncer.poll() is None:
            self.syncer.kill()
            self.syncer.wait(END_SECONDS)


def wait_for_all(
    fleets: Sequence[Fleet], *, deadline_seconds: float, each_tick: Callable[[], object] = lambda: None
) -> None:
    """Until all of them have finished; restarts meanwhile what is killed."""
    until = time.monotonic() + deadline_seconds
    while not all(fleet.finished for fleet in fleets):
        for fleet in fleets:
            fleet.poll()
        each_tick()
        if time.monotonic() > until:
            standing = [fleet.standing() for fleet in fleets]
            raise TimeoutError(
                f"runs in {fleets[0].folder.parent} not finished after {deadline_seconds:g} s: {standing}"
            )
        time.sleep(TICK_SECONDS)


def _run_rank(environment: dict[str, str], log: str, pace_seconds: float) -> None:
    """The body of a forked learner."""
    die_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    from training import rank, trainer

    os.environ.update(environment, OMP_NUM_THREADS="1")
    if pace_seconds:
        trainer.train_step = _paced(trainer.train_step, pace_seconds)
    os._exit(rank.main())


def _paced(step: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same step, begun at least `seconds` after the one before."""
    last = [0.0]

    def paced(*arguments: Any, **named: Any) -> Any:
        time.sleep(max(0.0, last[0] + seconds - time.monotonic()))
        last[0] = time.monotonic()
        return step(*arguments, **named)

    return paced


def write_json(path: Path, value: Any) -> None:
    """For results that people read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
