"""Helpers of the sync tests: a small plan, deterministic learners without torch, and the real server as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from spec.events import SyncLedger, SyncMerged, read_events
from spec.plan import LearnerPlan, NodePlan, Plan, SyncerPlan
from spec.sync import SyncConfig
from spec.sync_keys import ENVIRONMENT, SyncKeys
from spec.train import TrainConfig
from training.processes import free_port
from training.sync.adopt import FragmentState, apply_action, decide, restart
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout, fingerprint_weights, gather, scatter
from training.sync.messages import Contribution, Registration, Verdict

LAYOUT = Layout.from_shapes({"head.weight": [7, 5], "body.weight": [31, 4], "body.bias": [31], "scale": []})
ROUND_SAMPLES = 40
DEADLINE = 30.0
ROOT = Path(__file__).resolve().parents[2]


def make_plan(
    folder: Path,
    *,
    learners: Sequence[str] = ("east", "west"),
    target: int = 400,
    run: str = "r1",
    config: SyncConfig | None = None,
    store: str = "",
) -> Plan:
    """A plan with so many learners and a store under the folder, or elsewhere."""
    node = NodePlan(name="node-0", group="trainer", machine="cpu", ranks=1, cpu=1, memory=2**30, shm=2**20)
    return Plan(
        experiment="toy",
        run=run,
        backend="local",
        learners=[
            LearnerPlan(
                name=name,
                cluster="local-0",
                region="local",
                gpu=None,
                nodes=[node],
                world_size=1,
                data_manifest="file:///none",
                checkpoints="file:///none",
            )
            for name in learners
        ],
        train=TrainConfig(),
        syncer=SyncerPlan(
            cluster="local-0",
            control_port=0,
            bulk_port=0,
            store=store or (folder / "sync").as_uri(),
            config=config
            or SyncConfig.model_validate({"round_deadline": "20s", "lease": "20s", "outer_momentum": 0.5}),
            target_samples=target,
            round_samples=ROUND_SAMPLES,
        ),
    )


def train(theta: Floats, *, learner: str, cursor: int) -> Floats:
    """A round of local training: a pure function of its arguments, so that any rerun gives the same bits."""
    noise = np.random.default_rng([sum(learner.encode()), cursor]).standard_normal(len(theta)).astype(np.float32)
    return np.subtract(theta, np.float32(0.05) * (theta - noise), dtype=np.float32)


def ema_of(theta: Floats) -> Floats:
    """Stands for the learner's averaged weights."""
    return (theta * np.float32(0.9)).astype(np.float32)


def seed_weights() -> Floats:
    return np.random.default_rng(7).standard_normal(LAYOUT.total).astype(np.float32)


def halves() -> list[list[tuple[int, int]]]:
    """Ranges of two ranks that interleave, as sharded parameters do."""
    total = LAYOUT.total
    return [[(0, 10), (50, 70)], [(10, 40), (120, total - 120)]]


@dataclass
class ToyLearner:
    """A learner whose ranks are two clients in one process."""

    plan: Plan
    name: str
    control: str
    bulk: str
    ranks: int = 1
    step: FragmentState = field(default_factory=FragmentState)
    theta: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    anchor: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    fingerprints: dict[int, str] = field(default_factory=dict[int, str])
    run_samples: int = 0
    keys: SyncKeys | None = None

    def __post_init__(self) -> None:
        self.clients = [self.make_client() for _ in range(self.ranks)]
        self.registration: Registration | None = None

    def make_client(self) -> SyncClient:
        return SyncClient(
            self.control,
            bulk=self.bulk,
            run=self.plan.run,
            learner=self.name,
            layout=LAYOUT,
            call_timeout_seconds=5,
            barrier_timeout_seconds=DEADLINE,
            heartbeat_seconds=0.1,
            slice_seconds=0.5,
            check_seconds=0.1,
            keys=self.keys,
        )

    def join(self) -> Registration:
        """Register, seed if asked to, take the shared weights."""
        client = self.clients[0]
        self.registration = found = client.register(contract_hash(self.plan), world_size=self.ranks)
        if found.seed_needed:
            weights = seed_weights()
            client.put_seed(weights, generation=found.generation, ema=ema_of(weights))
        status = client.wait_version(0)
        self.step = restart(None, registration=found).state.fragments[0]
        self.step = replace(self.step, base_version=status.version)
        self.theta = self.anchor = client.fetch(status.version)
        return found

    def run(self) -> None:
        """One round of local steps."""
        self.theta = train(self.theta, learner=self.name, cursor=self.step.cursor)
        self.step = self.step.ran(ROUND_SAMPLES)
        self.run_samples += ROUND_SAMPLES

    def upload(self) -> Contribution:
        """All ranks send their parts."""
        assert self.registration is not None
        self.step = self.step.snapshot()
        delta, ema = self.theta - self.anchor, ema_of(self.theta) - self.anchor
        shards = halves() if self.ranks == 2 else [LAYOUT.whole]
        receipts = [
            self.clients[rank].put_part(
                gather(delta, shard),
                ema=gather(ema, shard),
                ranges=shard,
                generation=self.registration.generation,
                seq=self.step.seq,
                rank=rank,
            )
            for rank, shard in enumerate(shards)
        ]
        return Contribution(
            learner=self.name,
            generation=self.registration.generation,
            seq=self.step.seq,
            base_version=self.step.base_version,
            steps=self.step.pending_steps,
            samples=self.step.pending_samples,
            cursor=self.step.cursor,
            parts=receipts,
            fingerprint=LAYOUT.fingerprint,
            discarded_samples=self.step.discarded_samples,
        )

    def take(self, verdict: Verdict) -> Verdict:
        """Apply an answer."""
        self.verdicts.append(verdict)
        self.step, action = decide(self.step, verdict=verdict, pending_limit=2 * ROUND_SAMPLES)
        shared = np.empty(LAYOUT.total, np.float32)
        for client, shard in zip(self.clients, halves() if self.ranks == 2 else [LAYOUT.whole], strict=True):
            scatter(shared, shard, client.fetch(verdict.version, ranges=shard))
        self.theta, self.anchor = apply_action(self.theta, action=action, anchor=self.anchor, shared=shared)
        assert fingerprint_weights(shared) == verdict.theta_sha256
        self.fingerprints[verdict.version] = verdict.theta_sha256
        return verdict

    def round(self) -> Verdict:
        """Train, send, wait, adopt."""
        self.run()
        return self.take(self.clients[0].commit(self.upload()))

    def finish(self) -> None:
        """Rounds until the run is final."""
        while not self.round().final:
            pass

    def close(self) -> None:
        for client in self.clients:
            client.close()


@dataclass
class Server:
    """The real process."""

    folder: Path
    plan: Plan
    process: subprocess.Popen[bytes]
    control: str
    bulk: str

    def keys_of(self, learner: str) -> SyncKeys | None:
        """A learner's keys, if `gkr.sync_keys.write_keys` made some in `keys` of the folder before the start."""
        path = self.folder / "keys" / learner
        return SyncKeys.read_folder(path) if path.exists() else None

    def kill(self) -> None:
        """SIGKILL, as the machine would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE)

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE)

    def restart(self) -> Server:
        """On the same ports, as the supervisor does."""
        ports = [int(one.rpartition(":")[2]) for one in (self.control, self.bulk)]
        return start_server(self.folder, self.plan, control_port=ports[0], bulk_port=ports[1])

    def events(self) -> list[object]:
        return list(read_events((self.folder / "events.jsonl").read_text().splitlines()))

    def merges(self) -> list[SyncMerged]:
        return [one for one in self.events() if isinstance(one, SyncMerged)]

    def ledger(self) -> SyncLedger:
        return [one for one in self.events() if isinstance(one, SyncLedger)][-1]


def spawn_server(
    folder: Path, plan: Plan, *extra: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The process as the supervisor starts it, or its pod; with keys if the folder has some."""
    (folder / "plan.json").write_text(plan.model_dump_json())
    paths = [
        "--plan",
        str(folder / "plan.json"),
        "--endpoints",
        str(folder / "syncer.json"),
        "--events",
        str(folder / "events.jsonl"),
    ]
    keys = folder / "keys" / "run"
    own = {ENVIRONMENT: f"{keys}"} if keys.exists() else {}
    with (folder / "syncer.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "training.sync.server", *paths, *extra],
            stderr=log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **own, **(environment or {})},
        )


def start_server(
    folder: Path,
    plan: Plan,
    *extra: str,
    control_port: int = 0,
    bulk_port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Server:
    """Start and wait until it serves. Ports: default some that stay its own between a kill and a restart."""
    endpoints = folder / "syncer.json"
    endpoints.unlink(missing_ok=True)
    ports = ["--control-port", str(control_port or free_port()), "--bulk-port", str(bulk_port or free_port())]
    process = spawn_server(folder, plan, *ports, *extra, environment=environment)
    wait_until(lambda: endpoints.exists() or process.poll() is not None)
    assert process.poll() is None, (folder / "syncer.log").read_text()
    found = json.loads(endpoints.read_text())
    return Server(folder=folder, plan=plan, process=process, control=found["control"], bulk=found["bulk"])


def wait_until(condition: Callable[[], bool], *, seconds: float = DEADLINE) -> None:
    """Look again and again, with a deadline."""
    until, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < until, "the awaited did not happen"
        pause.wait(0.02)


def together(*tasks: Callable[[], object]) -> list[object]:
    """Run tasks in threads; their results, or the first error."""
    results: list[object] = [None] * len(tasks)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except BaseException as error:  # noqa: BLE001  (handed to the test)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive(), "a learner hangs"
    if errors:
        raise errors[0]
    return results
