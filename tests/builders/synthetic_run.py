"""A run's folder that no run made: SYNTHETIC events with the shapes and sizes of a real one.

For tests of whatever reads events. Two learners, 16 outer rounds, one killed rank; the same arguments give the same
bytes. The numbers are invented.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec import events as ev
from spec.fold import fold
from spec.plan import LearnerPlan, NodePlan, Origin, Plan, ServicePlan, SyncerPlan
from spec.services import ServiceKind
from spec.sync import SyncConfig
from spec.train import TrainConfig

Pixels = NDArray[np.uint8]
START = 1_796_000_000.0
INNER_STEPS, BATCH, WORLD_SIZE = 25, 64, 2
_GLYPHS = (
    "0e11191513110e",
    "040c040404040e",
    "0e11010204081f",
    "1f02040201110e",
    "02060a121f0202",
    "1f101e0101110e",
    "0608101e11110e",
    "1f010204080808",
    "0e11110e11110e",
    "0e11110f01020c",
)
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def synthetic_plan(*, names: tuple[str, ...] = ("east", "central"), rounds: int = 16) -> Plan:
    """A plan as `resolve` writes it for the local backend."""
    learners = [_learner(name, index=i) for i, name in enumerate(names)]
    syncer = SyncerPlan(
        cluster="local-0",
        control_port=0,
        bulk_port=0,
        store="file:///home/me/sync",
        config=SyncConfig(inner_steps=INNER_STEPS),
        target_samples=rounds * len(names) * INNER_STEPS * BATCH,
        round_samples=INNER_STEPS * BATCH,
    )
    return Plan(
        experiment="digits",
        run="20261130-143300-k3v9",
        backend="local",
        learners=learners,
        train=TrainConfig(),
        syncer=syncer,
        origins=_origins(),
    )


def _learner(name: str, *, index: int) -> LearnerPlan:
    node = NodePlan(
        name="node-0", group="trainer", machine="cpu-local", ranks=WORLD_SIZE, cpu=1.0, memory=2 * 2**30, shm=2**28
    )
    kinds: tuple[tuple[str, ServiceKind], ...] = (
        (("encoder", "encode"), ("sampler", "sample"), ("judge", "evaluate"))
        if index == 0
        else (("encoder", "encode"),)
    )
    services = [
        ServicePlan(name=service, kind=kind, replicas=1, cpu=0.5, memory=2**30, queue_depth=8, max_batch=64)
        for service, kind in kinds
    ]
    return LearnerPlan(
        name=name,
        cluster=f"local-{index}",
        region=f"local-{index}",
        gpu=None,
        nodes=[node],
        world_size=WORLD_SIZE,
        services=services,
        data_manifest=f"file:///home/me/buckets/local-{index}/data/digits/manifest.json",
        data_source="digits",
        checkpoints=f"file:///home/me/buckets/local-{index}/checkpoints",
    )


def _origins() -> list[Origin]:
    defaults = TrainConfig().model_dump(mode="json")
    found = [
        Origin(path=f"train.{key}", value=json.dumps(value), origin="default")
        for key, value in defaults.items()
        if not isinstance(value, dict)
    ]
    found += [
        Origin(path=f"train.model.{key}", value=json.dumps(value), origin="default")
        for key, value in defaults["model"].items()
    ]
    found += [
        Origin(path="sync.inner_steps", value="25", origin="file", where="recipes/digits.yaml:21"),
        Origin(path="train.samples", value="51200", origin="flag", where="--set train.samples=51200"),
        Origin(path="train.learning_rate", value="0.002", origin="recipe", where="recipes/train/digits.yaml:4"),
        Origin(path="learners.east.region", value="local-0", origin="facts", where="local backend"),
    ]
    return found


@dataclass
class _Writer:
    """Simulates the learners and keeps the events."""

    names: tuple[str, ...]
    rounds: int
    random: random.Random
    events: list[Any] = field(default_factory=list[Any])
    blocked: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    attempt: dict[str, int] = field(default_factory=dict[str, int])
    restored: dict[str, int] = field(default_factory=dict[str, int])
    """Samples behind a learner at its last restart."""
    requests: int = 0

    def say(self, kind: type[Any], *, at: float, source: str, **fields: Any) -> None:
        self.events.append(kind(time=START + at, source=source, **fields))

    def begin(self) -> float:
        self.say(ev.RunStatus, at=0.0, source="supervisor", status="preparing")
        for i, name in enumerate(self.names):
            driver = f"driver/{name}"
            self.blocked[name], self.attempt[name] = (
                dict.fromkeys(("snapshot", "barrier", "apply", "data", "encode"), 0.0),
                1,
            )
            manifest = f"file:///home/me/buckets/local-{i}/data/digits/manifest.json"
            self.say(
                ev.Prepared,
                at=6.2 + i,
                source=driver,
                learner=name,
                manifest=manifest,
                samples=1437,
                seconds=3.1,
                reused=i > 0,
            )
            self.say(
                ev.Preflight,
                at=12.0 + i,
                source=driver,
                learner=name,
                node="node-0",
                checks=_checks(i),
                seconds=3.4 + i,
            )
            pids = {"agent-0": 4100 + i, "rank-0": 4200 + 10 * i, "rank-1": 4201 + 10 * i}
            self.say(
                ev.AttemptStarted,
                at=15.0 + i,
                source=driver,
                learner=name,
                attempt=1,
                epoch=1,
                world_size=WORLD_SIZE,
                pids=pids,
            )
            self.say(
                ev.Restored,
                at=16.0 + i,
                source=driver,
                learner=name,
                attempt=1,
                mode="fresh",
                step=0,
                position=0,
                samples_lost=0,
            )
        self.say(ev.RunStatus, at=15.0, source="supervisor", status="running")
        return 18.0

    def steps(self, name: str, *, number: int, at: float, rate: float) -> float:
        """One round's inner steps; the second learner's rank 1 is killed in round 8 and comes back."""
        for step in range(5, INNER_STEPS + 1, 5):
            at += 5 / rate
            done = (number - 1) * INNER_STEPS + step
            if len(self.names) > 1 and name == list(self.names)[-1] and number == 8 and step == 15:
                at = self.restart(name, step=done - 5, at=at)
            self.blocked[name]["data"] += self.random.uniform(0, 0.004)
            self.blocked[name]["encode"] += self.random.uniform(0, 0.03) / number
            self.say(
                ev.StepMetrics,
                at=at,
                source=f"rank/{name}/0",
                learner=name,
                attempt=self.attempt[name],
                step=done,
                position=done * BATCH,
                round=number - 1,
                loss=0.16 + 1.1 * math.exp(-done / 45) + self.random.gauss(0, 0.012),
                gradient_norm=0.4 + 2 * math.exp(-done / 60) + self.random.random() * 0.2,
                learning_rate=2e-3
                * min(1, done / 40)
                * (0.525 + 0.475 * math.cos(math.pi * done / (self.rounds * INNER_STEPS))),
                steps_per_second=rate * self.random.uniform(0.96, 1.03),
                samples_per_second=rate * BATCH * self.random.uniform(0.96, 1.03),
                loader_queue=self.random.choice((2, 3, 3, 4, 4)),
                blocked_seconds=dict(self.blocked[name]),
                memory_bytes=410_000_000,
            )
            self.service("encoder", name, at=at, scale=1 + 6 / number)
        self.say(
            ev.CheckpointSaved,
            at=at,
            source=f"rank/{name}/0",
            learner=name,
            attempt=self.attempt[name],
            step=number * INNER_STEPS,
            path=f"file:///home/me/checkpoints/{number * INNER_STEPS}",
            bytes=3_800_000,
            blocked_seconds=0.006 + self.random.random() * 0.004,
            seconds=0.21,
        )
        return at

    def restart(self, name: str, *, step: int, at: float) -> float:
        driver = f"driver/{name}"
        self.say(
            ev.AttemptEnded,
            at=at + 0.3,
            source=driver,
            learner=name,
            attempt=1,
            cause="rank 1: SIGKILL",
            samples_run=step * BATCH,
        )
        self.say(ev.AttemptStarted, at=at + 1.2, source=driver, learner=name, attempt=2, epoch=2, world_size=WORLD_SIZE)
        self.say(
            ev.Restored,
            at=at + 3.0,
            source=driver,
            learner=name,
            attempt=2,
            mode="exact",
            step=step - 10,
            position=(step - 10) * BATCH,
            samples_lost=640,
            checkpoint=f"step-{step - 10}",
            skipped=[f"step-{step}: part 1 of 2 is missing"],
        )
        self.say(
            ev.Recovery,
            at=at + 4.6,
            source=driver,
            learner=name,
            what="rank 1",
            cause="SIGKILL",
            action="restarted all ranks from the last checkpoint",
            detected_seconds=0.28,
            first_step_seconds=4.6,
            lost_steps=10,
        )
        self.attempt[name], self.restored[name] = 2, (step - 10) * BATCH
        self.blocked[name] = dict.fromkeys(self.blocked[name], 0.0)
        return at + 6.0

    def service(self, service: str, name: str, *, at: float, scale: float) -> None:
        self.requests += 3
        depth = {f"{name}/rank-{rank}": self.random.choice((0, 0, 1, 1, 2, 3)) for rank in range(WORLD_SIZE)}
        p50 = (2.4 + self.random.random()) * scale
        self.say(
            ev.ServiceStats,
            at=at + 0.01,
            source=f"driver/{name}",
            learner=name,
            service=service,
            replica=0,
            incarnation=1,
            requests=self.requests,
            errors=0,
            p50_ms=p50,
            p99_ms=p50 * self.random.uniform(2.2, 4.5),
            queued=sum(depth.values()),
            queued_by_rank=depth,
            batch_mean=18.5,
            clients=WORLD_SIZE,
            grant=8,
            grant_bytes=2**26,
            queued_bytes=1000 * sum(depth.values()),
            by_priority={"blocking": {"requests": self.requests, "p50_ms": p50, "p99_ms": 3 * p50}},
            by_rank={
                rank: {"requests": 100, "outstanding": waiting, "outstanding_bytes": 1000 * waiting}
                for rank, waiting in depth.items()
            },
            weights=hashlib.sha256(service.encode()).hexdigest(),
        )

    def synchronise(self, *, number: int, ends: dict[str, float]) -> dict[str, float]:
        snapshot, merge, durable = 0.02, 0.03, 0.05
        last = max(ends.values()) + snapshot + 0.04
        done = last + merge + durable
        theta = hashlib.sha256(f"theta-{number}".encode()).hexdigest()
        first = min(ends.values())
        members = [
            ev.SyncMember(
                learner=name,
                generation=self.attempt[name],
                state="active",
                arrived_seconds=end - first,
                samples=INNER_STEPS * BATCH,
            )
            for name, end in ends.items()
        ]
        slow = max(ends, key=lambda name: ends[name])
        arrived = [name for name in ends if name != slow]
        self.say(
            ev.SyncWaiting,
            at=first,
            source="syncer",
            round=number,
            arrived=arrived,
            waiting_for=[slow],
            deadline=START + first + 120,
        )
        self.say(
            ev.SyncMerged,
            at=done,
            source="syncer",
            round=number,
            epoch=1,
            members=members,
            open_seconds=last - first - snapshot,
            merge_seconds=merge,
            durable_seconds=durable,
            outer_gradient_norm=4.0 / number,
            cosine=0.86 - 0.012 * number + self.random.gauss(0, 0.02) if len(ends) > 1 else None,
            samples_total=number * len(ends) * INNER_STEPS * BATCH,
            theta_sha256=theta,
            model_sha256=theta,
            bytes_in=3_800_000,
            final=number == self.rounds,
        )
        counts = dict.fromkeys(ends, number * INNER_STEPS * BATCH)
        self.say(
            ev.SyncLedger, at=done, source="syncer", round=number, merged=counts, discarded=dict.fromkeys(ends, 0),
            final=number == self.rounds, model_sha256=theta,
        )  # fmt: skip
        after: dict[str, float] = {}
        for name, end in ends.items():
            apply, waited = 0.03 + self.random.random() * 0.02, done + 0.01 - end - snapshot
            after[name] = done + 0.01 + apply
            for cause, seconds in (("snapshot", snapshot), ("barrier", waited), ("apply", apply)):
                self.blocked[name][cause] += seconds
            applied = {"learner": name, "round": number}
            self.say(
                ev.Applied,
                at=after[name],
                source=f"rank/{name}/0",
                theta_sha256=theta,
                waited_seconds=waited,
                verdict="merged",
                **applied,
            )
            self.say(
                ev.Validation,
                at=after[name] + 0.1,
                source=f"rank/{name}/0",
                loss=0.17 + 1.05 * math.exp(-number / 1.9),
                **applied,
            )
        return after


def synthetic_events(
    folder: Path, *, names: tuple[str, ...] = ("east", "central"), rounds: int = 16, finished: bool = True
) -> list[Any]:
    """All events of a run; sample files are written below `folder`."""
    writer = _Writer(names=names, rounds=rounds, random=random.Random(7))
    now = dict.fromkeys(names, writer.begin())
    for number in range(1, rounds + 1):
        rates = {
            name: (9.0 if i == 0 else 7.6 + 0.6 * math.sin(number)) * writer.random.uniform(0.95, 1.05)
            for i, name in enumerate(names)
        }
        ends = {name: writer.steps(name, number=number, at=now[name], rate=rates[name]) for name in names}
        now = writer.synchronise(number=number, ends=ends)
        if number % 2 == 0:
            _evaluate(writer, folder=folder, number=number, at=max(now.values()) + 0.8)
    end = max(now.values())
    if finished:
        for name in names:
            fields = {"learner": name, "attempt": writer.attempt[name]}
            theta = hashlib.sha256(f"theta-{rounds}".encode()).hexdigest()
            done = rounds * INNER_STEPS
            writer.say(
                ev.LearnerFinished,
                at=end + 0.1,
                source=f"rank/{name}/0",
                step=done,
                samples_pending=0,
                samples_discarded=0,
                theta_sha256=theta,
                round=rounds,
                blocked_seconds=writer.blocked[name],
                **fields,
            )
            writer.say(
                ev.AttemptEnded,
                at=end + 0.4,
                source=f"driver/{name}",
                cause="finished",
                samples_run=done * BATCH - writer.restored.get(name, 0),
                **fields,
            )
        writer.say(ev.RunStatus, at=end + 4.0, source="supervisor", status="succeeded", exit_code=0)
    return sorted(writer.events, key=lambda one: one.time)


def _evaluate(writer: _Writer, *, folder: Path, number: int, at: float) -> None:
    home, final = writer.names[0], number == writer.rounds
    share = 1 - math.exp(-number / 3)
    generated, real, captions = synthetic_pictures(sharpness=share, count=64)
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    np.save(folder / f"samples/round-{number}.npy", generated)
    np.save(folder / f"samples/round-{number}-real.npy", real)
    sha = hashlib.sha256(f"theta-{number}".encode()).hexdigest()
    paths = {"path": f"samples/round-{number}.npy", "real_path": f"samples/round-{number}-real.npy"}
    writer.say(ev.Samples, at=at, source=f"driver/{home}", round=number, model_sha256=sha, captions=captions, **paths)
    writer.say(
        ev.Score,
        at=at + 0.2,
        source=f"driver/{home}",
        round=number,
        final=final,
        model_sha256=sha,
        samples=360 if final else 64,
        classifier_accuracy=0.15 + 0.84 * share,
        classifier_accuracy_real=0.978,
        frechet_distance=3.2 + 150 * math.exp(-number / 2.4),
        frechet_distance_real=1.4,
        nearest_train_distance=1.13,
        nearest_train_distance_real=1.02,
    )
    for service in ("sampler", "judge"):
        writer.service(service, home, at=at, scale=30)


def synthetic_pictures(*, sharpness: float, count: int) -> tuple[Pixels, Pixels, list[str]]:
    """Blurred letters of a pixel font.

    Uint8 [count, 8, 8, 1] drowned in noise by 1 - sharpness, the clear ones, and captions.
    """
    noise = np.random.default_rng(1)
    clear = np.stack([_digit(i % 10, shift=i % 3) for i in range(count)])
    shown = sharpness * np.roll(clear, 1, axis=2) + (1 - sharpness) * noise.random(clear.shape)
    captions = [
        f"a {('thin', 'bold', 'medium')[i % 3]} {('upright', 'slanted')[i % 2]} handwritten {_WORDS[i % 10]}"
        for i in range(count)
    ]
    generated, real = ((np.clip(one, 0, 1) * 255).astype(np.uint8)[..., None] for one in (shown, clear))
    return generated, real, captions


def _digit(digit: int, *, shift: int) -> NDArray[np.float64]:
    rows = bytes.fromhex(_GLYPHS[digit])
    image = np.zeros((8, 8))
    for y, bits in enumerate(rows):
        for x in range(5):
            image[y, x + shift] = (bits >> (4 - x)) & 1
    return 0.8 * image + 0.1 * np.roll(image, 1, axis=1) + 0.1 * np.roll(image, 1, axis=0)


def _checks(index: int) -> list[ev.Check]:
    passed = [
        ("host.disk", "free disk", "212 GiB", ">= 2 GiB"),
        ("host.memory", "free memory", "19.4 GiB", ">= 2 GiB"),
        ("host.clock", "clock offset", "0.2 ms", "<= 50 ms"),
        ("host.limits", "open files limit", "1048576", ">= 4096"),
        ("host.ports", "ports bind", "3 of 3", "all"),
        ("data.manifest", "manifest opens", "6 shards", "readable"),
        ("data.hash", "shard hash", "match", "match"),
        ("ckpt.write", "write, read, delete", "11 ms", "<= 5 s"),
        ("model.steps", "two real steps", "loss 1.21, 1.18", "finite"),
    ]
    checks = [
        ev.Check(id=key, name=name, verdict="PASS", value=value, threshold=limit, seconds=0.04)
        for key, name, value, limit in passed
    ]
    shm = ev.Check(
        id="host.shm",
        name="shared memory",
        verdict="WARN",
        value="64 MiB",
        threshold=">= 256 MiB",
        evidence="/dev/shm is tmpfs, size=65536k",
        seconds=0.001,
    )
    numa = ev.Check(
        id="host.numa",
        name="NUMA placement",
        verdict="UNKNOWN",
        value="-",
        threshold="1 node",
        evidence="/sys/devices/system/node is not readable",
    )
    return [*checks, shm, numa] if index == 0 else checks


def write_synthetic_run(
    folder: Path, *, names: tuple[str, ...] = ("east", "central"), rounds: int = 16, finished: bool = True
) -> Path:
    """A whole run folder, `digits/<run>` below `folder`; unfinished ones have no summary."""
    plan = synthetic_plan(names=names, rounds=rounds)
    run = folder / plan.experiment / plan.run
    run.mkdir(parents=True)
    (run / "plan.json").write_text(plan.write_json())
    events = synthetic_events(run, names=names, rounds=rounds, finished=finished)
    (run / "events.jsonl").write_text("".join(ev.write_event(one) for one in events))
    if finished:
        versions = {"gkr": "0.1.0", "python": "3.11.7", "torch": "2.15.0", "ray": "2.60.0", "numpy": "2.4.6"}
        (run / "summary.json").write_text(fold(events, plan, versions=versions).write_json())
    return run
