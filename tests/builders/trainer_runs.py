"""Real ranks and a real syncer without Ray: ranks are forked by a node's real zygote, in folders of their own.

For tests that need the trainer itself: worlds of several sizes, kills, restarts, both modes of the sync. torch is
imported once for all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from spec import events as ev
from spec.events import Event, read_events
from spec.plan import LearnerPlan, Plan, SyncerPlan
from spec.sync import SyncConfig
from spec.train import TrainConfig
from tests.builders.sync_world import ROOT, wait_until
from tools.fleet import place_learner, rank_contexts, start_syncer
from training.files import replace_text
from training.processes import free_port
from training.progress import read_page

DEADLINE = 150.0
BATCH = 16
SMALL: dict[str, Any] = {
    "batch": BATCH,
    "dtype": "float32",
    "loader_workers": 1,
    "log_every": 1,
    "checkpoint": {"every_steps": 3},
    "model": {"width": 32, "depth": 2, "heads": 2, "conditioning": "class"},
}
GATED = """
import pathlib, sys, threading
import training.sync.desk as desk
import training.sync.server as server
gate = pathlib.Path(sys.argv[sys.argv.index("--plan") + 1]).parent / "allowed"
take = desk.Desk.commit
def commit(self, contribution, *, wait_seconds):
    if contribution.seq > int(gate.read_text()):
        threading.Event().wait(min(wait_seconds, 0.2))
        return None
    return take(self, contribution, wait_seconds=wait_seconds)
desk.Desk.commit = commit
sys.exit(server.main())
"""
"""The real syncer, but it takes contributions only up to the sequence in `allowed`; to others it has no verdict yet, so
that learners come to stand by themselves and a test may look as late as it likes."""
E = TypeVar("E")


def allow(folder: Path, seq: int) -> None:
    """The contributions that a gated syncer of this folder takes, of each learner to each fragment."""
    replace_text(folder / "allowed", str(seq))


@dataclass
class Rank:
    """One forked rank."""

    job: str
    log: Path
    pid: int = 0
    code: int | None = None

    def stop_with_page(self, path: Path) -> bool:
        """SIGSTOP; it goes on if that came inside a write of its page."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, seconds=DEADLINE)
        if read_page(path) is not None:
            return True
        os.kill(self.pid, signal.SIGCONT)
        return False

    def kill(self) -> None:
        """SIGKILL, as the machine would."""
        if self.code is None:
            with suppress(ProcessLookupError):  # it has ended, and the zygote's word of it is not here yet
                os.kill(self.pid, signal.SIGKILL)


@dataclass
class Zygote:
    """A node's zygote, which several runs share one after the other."""

    process: subprocess.Popen[bytes]
    ranks: dict[str, Rank] = field(default_factory=dict[str, Rank])

    @classmethod
    def start(cls) -> Zygote:
        """Returns at once; the first spawn waits for the imports."""
        process = subprocess.Popen(
            [sys.executable, "-m", "training.zygote"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        zygote = cls(process)
        threading.Thread(target=zygote._listen, daemon=True).start()
        return zygote

    def spawn(self, job: str, *, environment: dict[str, str], log: Path) -> Rank:
        """Fork a rank. `job`: unlike all others of this zygote."""
        assert self.process.stdin is not None
        rank = self.ranks[job] = Rank(job, log)
        command = {"do": "spawn", "job": job, "call": "rank", "env": environment, "log": str(log)}
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        wait_until(lambda: bool(rank.pid), seconds=DEADLINE)
        return rank

    def close(self) -> None:
        """End it, and its ranks with it."""
        self.process.communicate(timeout=30)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["is"] == "spawned":
                self.ranks[event["job"]].pid = event["pid"]
            elif event["is"] == "exited":
                self.ranks[event["job"]].code = event["code"]


class TrainerRun:
    """One syncer, and learners by name with their number of ranks. Each attempt has a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        zygote: Zygote,
        uri: str,
        worlds: Mapping[str, int],
        samples: int,
        sync: Mapping[str, Any],
        train: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.zygote, self.uri, self.worlds = folder, zygote, uri, dict(worlds)
        self.ports = [free_port() for _ in range(2)]
        self.syncers: list[subprocess.Popen[bytes]] = []
        self.started: list[Rank] = []
        self.attempts = dict.fromkeys(worlds, 0)
        self.ended_at = dict.fromkeys(worlds, 0)
        """Position at the end of the learner's last attempt."""
        self.samples_run: dict[str, list[tuple[int, int]]] = {name: [] for name in worlds}
        """Of each attempt: samples, and the position at its end."""
        config = SyncConfig.model_validate({"round_deadline": "60s", "lease": "60s", **sync})
        trained = TrainConfig.model_validate({**SMALL, "samples": samples, **(train or {})})
        self.plan = Plan(
            experiment="e",
            run="r1",
            backend="local",
            learners=[self._learner(name, ranks) for name, ranks in worlds.items()],
            train=trained,
            syncer=SyncerPlan(
                cluster="c", control_port=self.ports[0], bulk_port=self.ports[1], store=f"{uri}/run/sync",
                config=config, target_samples=samples, round_samples=config.inner_steps * trained.batch,
            ),
        )  # fmt: skip
        (folder / "plan.json").write_text(self.plan.write_json())

    def _learner(self, name: str, ranks: int) -> LearnerPlan:
        data = f"{self.uri}/data/digits/manifest.json"
        checkpoints = f"{self.uri}/run/checkpoints/{name}"
        return place_learner(name, ranks=ranks, data=data, checkpoints=checkpoints, run_uri=f"{self.uri}/run")

    def syncer(
        self, *, until_final: bool = True, program: Sequence[str] = ("-m", "training.sync.server")
    ) -> subprocess.Popen[bytes]:
        """Start it, on the run's ports. `program`: what Python runs, if it is not the server itself."""
        endpoints = self.folder / "syncer.json"
        self.syncers.append(start_syncer(self.folder, endpoints=endpoints, until_final=until_final, program=program))
        return self.syncers[-1]

    def ranks(self, learner: str) -> list[Rank]:
        """Start a new attempt of a learner."""
        self.attempts[learner] = attempt = self.attempts[learner] + 1
        node_dir = self.node_dir(learner)
        node_dir.mkdir()
        control, bulk = (f"127.0.0.1:{port}" for port in self.ports)
        contexts = rank_contexts(
            self.folder / "plan.json", self.plan.learner(learner), node_dir=node_dir, attempt=attempt,
            control=control, bulk=bulk, position=self.ended_at[learner],
        )  # fmt: skip
        started: list[Rank] = []
        for context in contexts:
            environment = {**context.to_environment(), "GKR_RUN_DIR": str(node_dir)}
            name = f"{learner}-{attempt}-{context.rank}"
            job = f"{self.folder}/{name}"
            started.append(self.zygote.spawn(job, environment=environment, log=self.folder / f"{name}.log"))
        self.started += started
        return started

    def end(self, learner: str, ranks: list[Rank], *, kill: bool = False) -> None:
        """Wait for an attempt's end, or make it, and keep its account as a driver does."""
        if kill:
            # Of a page whose writer died inside a write nothing is known; a driver would go by its last look.
            wait_until(lambda: ranks[0].stop_with_page(self.node_dir(learner) / "progress-0.page"), seconds=DEADLINE)
            for one in ranks:
                one.kill()
        wait_until(lambda: all(one.code is not None for one in ranks), seconds=DEADLINE)
        assert kill or all(one.code == 0 for one in ranks), self.logs()
        page = read_page(self.node_dir(learner) / "progress-0.page")
        assert page is not None
        if page.position >= 0:
            self.ended_at[learner] = page.position
        self.samples_run[learner].append((page.samples_run, self.ended_at[learner]))

    def until(self, condition: Callable[[], object], *, seconds: float = DEADLINE) -> None:
        """Wait for something while everything that was not killed lives."""

        def look() -> bool:
            bad = [one.job for one in self.started if one.code not in (None, 0, -signal.SIGKILL)]
            assert not bad, f"{bad}\n{self.logs()}"
            assert all(one.poll() in (None, 0, -signal.SIGKILL) for one in self.syncers), self.logs()
            return bool(condition())

        wait_until(look, seconds=seconds)

    def train(self, *, program: Sequence[str] = ("-m", "training.sync.server"), seconds: float = DEADLINE) -> None:
        """The whole run, without trouble."""
        syncer = self.syncer(program=program)
        started = {name: self.ranks(name) for name in self.worlds}
        self.until(lambda: all(one.code is not None for ranks in started.values() for one in ranks), seconds=seconds)
        for name, ranks in started.items():
            self.end(name, ranks)
        assert syncer.wait(30) == 0, self.logs()

    def node_dir(self, learner: str) -> Path:
        """Folder of the learner's newest attempt."""
        return self.folder / f"{learner}-{self.attempts[learner]}"

    def events(self, learner: str = "") -> list[Event]:
        """All events so far of a learner's rank 0 (all attempts), or of the syncer."""
        if not learner:
            paths = [self.folder / "events.jsonl"]
        else:
            attempts = range(1, self.attempts[learner] + 1)
            paths = [self.folder / f"{learner}-{one}" / f"events-{one}-0.jsonl" for one in attempts]
        return [one for path in paths if path.exists() for one in read_events(path.read_text().splitlines())]

    def of(self, kind: type[E], learner: str = "") -> list[E]:
        """Events of one kind."""
        return [one for one in self.events(learner) if isinstance(one, kind)]

    def all_events(self) -> list[Event]:
        """Of everybody, with what a driver adds: attempts and what ran in them."""
        found = self.events()
        for name in self.worlds:
            found += self.events(name)
            for number, (samples, position) in enumerate(self.samples_run[name], start=1):
                ended = ev.AttemptEnded(
                    time=0, source="test", learner=name, attempt=number, cause="", samples_run=samples,
                    position=position,
                )  # fmt: skip
                found.append(ended)
        return found

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """Whatever happened, nothing stays."""
        for rank in self.started:
            rank.kill()
        for one in self.syncers:
            one.kill()
            one.wait(20)
