"""The campaign of the sync: four learners with paced steps lose processes, time and links, and train on all the same.

Two runs of the same experiment go on side by side, so that whatever else the machine does slows both alike: one without
faults, one with seeded faults. Learners are killed and stopped, their links are cut, the syncer is killed. Injections
are counted where they are made, not by their recoveries. Promised: every fault is got over, no sample is lost from the
ledger, all hold equal weights at each version, the loss is within 2 % of the fault-free run's, and merged steps per
second of living time, as long as both run, are at least 97 % of its.

Dead time is from a fault to the first step behind it: of the learner that was hit, in decoupled mode; of everybody, in
barrier mode, where all wait. While the syncer or a link is away a decoupled learner trains on for `max_ahead` rounds;
only what is longer is dead time. Steps that a kill lost are not taken off.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from spec import events as ev
from spec.fold import fold
from spec.link import LinkConfig, PartitionConfig
from spec.sync import SyncConfig
from spec.train import TrainConfig
from tools.chaos.schedule import Fault, make_schedule, union_seconds
from tools.fleet import Fleet, make_plan, wait_for_all

Mode = Literal["barrier", "decoupled"]
MODES: tuple[Mode, ...] = get_args(Mode)
LEARNERS = ("ash", "elm", "fir", "oak")
BATCH, INNER_STEPS = 16, 8
MAX_AHEAD = 4
PACE_SECONDS = 0.1
FAULTS_OF_EACH_KIND = 3
LEAST_RATE, MOST_LOSS = 0.97, 1.02
RUN_DEADLINE_SECONDS = 1500.0


@dataclass(frozen=True)
class Injection:
    """A fault as it was really made."""

    fault: Fault
    start: float
    """Unix time."""
    end: float
    """When its cause was over: at once for a kill."""


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    rounds: int
    """Rounds of all learners that the merged steps make."""
    merged_steps: int
    loss: float
    ledger_imbalance: int
    learners_agree: bool
    lost_samples: int
    restarts: int
    blocked_seconds: float


@dataclass(frozen=True)
class Run:
    """One run that is over."""

    outcome: Outcome
    events: list[ev.Event]
    injections: list[Injection]

    @property
    def begin(self) -> float:
        """Of the first step."""
        return min(one.time for one in self.events if isinstance(one, ev.StepMetrics))

    @property
    def end(self) -> float:
        """Of the last merge."""
        return max(one.time for one in self.events if isinstance(one, ev.SyncMerged))


def campaign(folder: Path, seed: int, mode: str, rounds: int) -> dict[str, object]:
    """Both runs, and what of the promises is broken; nothing if all held."""
    seconds = rounds * INNER_STEPS * PACE_SECONDS
    faults = make_schedule(seed, learners=LEARNERS, seconds=seconds, each=FAULTS_OF_EACH_KIND)
    calm, rough = run_all({folder / "calm": [], folder / "rough": faults}, mode=mode, rounds=rounds)
    recoveries = [recovery_seconds(one, rough.events) for one in rough.injections]
    end, ahead = min(calm.end, rough.end), MAX_AHEAD * INNER_STEPS * PACE_SECONDS
    dead = dead_seconds(rough.injections, recoveries, mode=mode, ahead=ahead, end=end)
    rate = pace_of(rough, end=end, dead=dead) / pace_of(calm, end=end, dead=0.0)
    loss = rough.outcome.loss / calm.outcome.loss
    return {
        "mode": mode, "seed": seed, "rate": rate, "loss": loss, "dead_learner_seconds": dead,
        "seconds": end - calm.begin, "calm": asdict(calm.outcome), "rough": asdict(rough.outcome),
        "injections": [{"kind": one.fault.kind, "learner": one.fault.learner, "seconds": one.end - one.start,
                        "recovery_seconds": back} for one, back in zip(rough.injections, recoveries, strict=True)],
        "broken": broken_promises(rough.outcome, rate=rate, loss=loss, rounds=rounds, planned=len(faults),
                                  recoveries=recoveries),
    }  # fmt: skip


def pace_of(run: Run, *, end: float, dead: float) -> float:
    """Merged steps until `end` per second that a learner lived."""
    merged = [one.samples_total for one in run.events if isinstance(one, ev.SyncMerged) and one.time <= end]
    return max(merged) / BATCH / (len(LEARNERS) * (end - run.begin) - dead)


def broken_promises(
    rough: Outcome, *, rate: float, loss: float, rounds: int, planned: int, recoveries: list[float | None]
) -> list[str]:
    """In words; empty if all held."""
    checks = {
        f"{planned - len(recoveries)} of {planned} faults were not made": len(recoveries) == planned,
        f"{recoveries.count(None)} faults were not got over": None not in recoveries,
        f"{rough.rounds} rounds of {rounds}": rough.rounds >= rounds,
        f"ledger is off by {rough.ledger_imbalance} samples": rough.ledger_imbalance == 0,
        "learners do not agree on every version": rough.learners_agree,
        f"merged steps per living second are {rate:.3f} of the fault-free run's": rate >= LEAST_RATE,
        f"loss is {loss:.3f} of the fault-free run's": loss <= MOST_LOSS,
    }
    return [words for words, held in checks.items() if not held]


def run_all(runs: dict[Path, list[Fault]], *, mode: str, rounds: int) -> list[Run]:
    """Runs with their faults, side by side, each in its folder, to their ends."""
    fleets = [make_fleet(folder, faults=faults, mode=mode, rounds=rounds) for folder, faults in runs.items()]
    with ExitStack() as stack:
        for fleet in fleets:
            stack.enter_context(fleet.running())
        injectors = [Injector(fleet, faults) for fleet, faults in zip(fleets, runs.values(), strict=True)]
        wait_for_all(fleets, deadline_seconds=RUN_DEADLINE_SECONDS, each_tick=lambda: [one.tick() for one in injectors])
    return [
        Run(outcome_of(fleet), fleet.events(), injector.made) for fleet, injector in zip(fleets, injectors, strict=True)
    ]


def make_fleet(folder: Path, *, faults: list[Fault], mode: str, rounds: int) -> Fleet:
    """Four learners with links of their own."""
    train = TrainConfig.model_validate({
        "samples": rounds * INNER_STEPS * BATCH * len(LEARNERS), "batch": BATCH, "dtype": "float32",
        "loader_workers": 0, "log_every": 1, "learning_rate": 2e-3, "warmup_samples": 20 * BATCH * len(LEARNERS),
        "checkpoint": {"every_steps": INNER_STEPS}, "ema_decay": 0.9,
        "model": {"width": 32, "depth": 2, "heads": 2, "mlp_ratio": 2.0, "conditioning": "class"},
    })  # fmt: skip
    sync = SyncConfig.model_validate({
        "mode": mode, "inner_steps": INNER_STEPS, "outer_momentum": 0.5, "lease": "5s", "heartbeat": "0.5s",
        "round_deadline": "30s", "max_ahead": MAX_AHEAD,
    })  # fmt: skip
    links = {name: LinkConfig(partitions=[
        PartitionConfig.model_validate({"after": f"{one.at:.3f}s", "lasts": f"{one.lasts:.3f}s"})
        for one in faults if one.kind == "partition" and one.learner == name
    ]) for name in LEARNERS}  # fmt: skip
    plan = make_plan(
        folder, learners=dict.fromkeys(LEARNERS, 1), train=train, sync=sync, source="sklearn-digits", links=links
    )
    return Fleet(plan, folder=folder, pace_seconds=PACE_SECONDS)


def outcome_of(fleet: Fleet) -> Outcome:
    """Of a run that is over."""
    events = fleet.events()
    summary = fold(events, fleet.plan)
    assert summary.sync is not None
    merged = sum(one.ledger.merged for one in summary.learners)
    return Outcome(
        rounds=merged // (BATCH * INNER_STEPS * len(LEARNERS)),
        merged_steps=merged // BATCH,
        loss=[one.loss for one in events if isinstance(one, ev.Validation)][-1],
        ledger_imbalance=summary.sync.ledger_imbalance,
        learners_agree=summary.sync.learners_agree,
        lost_samples=sum(one.ledger.lost for one in summary.learners),
        restarts=sum(one.restarts for one in summary.learners),
        blocked_seconds=sum(sum(one.blocked_seconds.model_dump().values()) for one in summary.learners),
    )


class Injector:
    """Makes the faults when their time has come."""

    def __init__(self, fleet: Fleet, faults: list[Fault]) -> None:
        self._fleet, self._left = fleet, sorted(faults, key=lambda one: one.at)
        self._started, self._clock = time.monotonic(), time.time() - time.monotonic()
        self._stopped: list[tuple[float, list[int]]] = []
        self.made: list[Injection] = []

    def tick(self) -> None:
        """Called often by whoever waits for the run."""
        now = time.monotonic()
        for until, pids in [one for one in self._stopped if one[0] <= now]:
            self._stopped.remove((until, pids))
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if self._left and self._started + self._left[0].at <= now:
            self._inject(self._left.pop(0), now=now)

    def _inject(self, fault: Fault, *, now: float) -> None:
        """A fault whose victim is just being started again waits until there is somebody to hit."""
        end = now
        if fault.kind == "kill syncer":
            hit = self._fleet.kill_syncer()
        elif fault.kind == "kill learner":
            hit = bool(self._fleet.signal_learner(fault.learner, signal.SIGKILL))
        elif fault.kind == "stop learner":
            pids = self._fleet.signal_learner(fault.learner, signal.SIGSTOP)
            hit, end = bool(pids), now + fault.lasts
            self._stopped.append((end, pids))
        else:  # the learner's link itself is cut: it knows the times from the plan
            hit, end = True, now + fault.lasts
        if hit:
            self.made.append(Injection(fault, now + self._clock, end + self._clock))
        else:
            self._left.insert(0, fault)


def recovery_seconds(injection: Injection, events: list[ev.Event]) -> float | None:
    """From the fault to the first sign of work behind it; none if there was none.

    A killed learner's first step of a new attempt; a stopped one's first step after it may run again; of a link, the
    first verdict that came through after it was cut; of the syncer, the first merge.
    """
    kind, learner = injection.fault.kind, injection.fault.learner
    old = max((one.attempt for one in events if isinstance(one, ev.AttemptStarted) and one.learner == learner
               and one.time <= injection.start), default=0)  # fmt: skip
    for one in events:
        if one.time < injection.end:
            continue
        hit = getattr(one, "learner", "") == learner
        if (
            (kind == "kill syncer" and isinstance(one, ev.SyncMerged))
            or (kind == "partition" and hit and isinstance(one, ev.Applied))
            or (kind == "stop learner" and hit and isinstance(one, ev.StepMetrics))
            or (kind == "kill learner" and hit and isinstance(one, ev.StepMetrics) and one.attempt > old)
        ):
            return one.time - injection.start
    return None


def dead_seconds(
    injections: list[Injection], recoveries: list[float | None], *, mode: str, ahead: float, end: float
) -> float:
    """Learner seconds before `end` in which faults kept learners from training, over all learners.

    `ahead`: seconds that a decoupled learner trains on while it cannot reach the syncer.
    """
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in LEARNERS}
    for one, back in zip(injections, recoveries, strict=True):
        start, over = one.start, min(end, one.start + (back or 0.0))
        if mode == "decoupled" and one.fault.kind in ("kill syncer", "partition"):
            start += ahead
        for name in (one.fault.learner,) if mode == "decoupled" and one.fault.learner else LEARNERS:
            spans[name].append((start, max(start, over)))
    return sum(union_seconds(some) for some in spans.values())


def describe(result: dict[str, Any]) -> str:
    """One paragraph for the terminal."""
    backs = [one["recovery_seconds"] for one in result["injections"] if one["recovery_seconds"] is not None]
    counts: dict[str, int] = {}
    for one in result["injections"]:
        counts[one["kind"]] = counts.get(one["kind"], 0) + 1
    made = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
    return (
        f"chaos sync, {result['mode']}, seed {result['seed']}: {result['rough']['rounds']} rounds, {made}; "
        f"merged steps per living second {result['rate']:.3f} of the fault-free run, loss {result['loss']:.4f}, "
        f"ledger {result['rough']['ledger_imbalance']}, lost samples {result['rough']['lost_samples']}, "
        f"longest recovery {max(backs, default=0.0):.1f} s: "
        + ("all promises held" if not result["broken"] else "BROKEN: " + "; ".join(result["broken"]))
    )
