"""A decoupled run's folder that no run made: SYNTHETIC events with the shapes of a real one.

Three learners of different speed, fragments in turn, answers that take seconds while training goes on; one learner is
stopped by `max_ahead` for a while. The same arguments give the same bytes. The numbers are invented.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec import events as ev
from spec.fold import fold
from spec.plan import Plan
from spec.sync import SyncConfig
from tests.builders.synthetic_run import BATCH, START, synthetic_plan

NAMES = ("east", "central", "west")
STEPS_PER_SECOND = {"east": 9.0, "central": 7.4, "west": 4.1}
INNER_STEPS = 40
LATENCY_SECONDS = 2.5
CUT = ("west", 36.0, 52.0)
"""A learner that is not answered between these seconds; its last ten it stands still."""
_LOGGED = 5


def decoupled_plan(*, fragments: int) -> Plan:
    """A plan of three learners in decoupled mode."""
    plan = synthetic_plan(names=NAMES)
    assert plan.syncer is not None
    config = SyncConfig(mode="decoupled", inner_steps=INNER_STEPS, fragments=fragments, codec="bf16")
    syncer = plan.syncer.model_copy(update={"config": config, "target_samples": 51_200})
    return plan.model_copy(update={"syncer": syncer})


@dataclass
class _Simulation:
    fragments: int
    random: random.Random
    events: list[Any] = field(default_factory=list[Any])
    flights: list[tuple[float, str, int]] = field(default_factory=list[tuple[float, str, int]])
    """(arrival, learner, fragment)."""

    def say(self, kind: type[Any], *, at: float, source: str, **fields: Any) -> None:
        self.events.append(kind(time=START + at, source=source, **fields))

    def learner(self, name: str, *, until: float) -> None:
        driver, rank = f"driver/{name}", f"rank/{name}/0"
        self.say(ev.AttemptStarted, at=5.0, source=driver, learner=name, attempt=1, epoch=1, world_size=2)
        at, step, ahead = 8.0, 0, 0.0
        while at < until:
            at += 1 / STEPS_PER_SECOND[name]
            if name == CUT[0] and CUT[2] - 10 <= at < CUT[2]:
                ahead += CUT[2] - at
                at = CUT[2]
            step += 1
            for fragment in range(self.fragments):
                if step % INNER_STEPS == fragment * INNER_STEPS // self.fragments and step >= INNER_STEPS:
                    self.flights.append((at + LATENCY_SECONDS / 2, name, fragment))
            if step % _LOGGED == 0:
                blocked = {"snapshot": step * 2e-4, "apply": step * 1e-4, "max_ahead": ahead, "barrier": 0.0}
                self.say(
                    ev.StepMetrics, at=at, source=rank, learner=name, attempt=1, step=step, position=step * BATCH,
                    round=step // INNER_STEPS, loss=0.2 + math.exp(-step / 90), gradient_norm=0.5, learning_rate=1e-3,
                    steps_per_second=STEPS_PER_SECOND[name],
                    samples_per_second=STEPS_PER_SECOND[name] * BATCH, blocked_seconds=blocked,
                )  # fmt: skip
        fields = {"learner": name, "attempt": 1}
        blocked = {"snapshot": step * 2e-4, "apply": step * 1e-4, "max_ahead": ahead}
        self.say(
            ev.LearnerFinished, at=until + 1, source=rank, step=step, samples_pending=0, samples_discarded=0,
            theta_sha256="a" * 64, round=0, blocked_seconds=blocked, **fields,
        )  # fmt: skip
        self.say(
            ev.AttemptEnded, at=until + 1.5, source=driver, cause="finished", samples_run=step * BATCH,
            position=step * BATCH, **fields,
        )  # fmt: skip

    def merges(self) -> None:
        grace, merge, durable = 0.4, 0.05, 0.12
        versions = [0] * self.fragments
        bases: dict[tuple[str, int], int] = {}

        def merged_at(arrival: float, name: str) -> float:
            at = arrival + grace + merge + durable
            return CUT[2] if name == CUT[0] and CUT[1] < at < CUT[2] else at

        merges = sorted((merged_at(arrival, name), arrival, name, fragment) for arrival, name, fragment in self.flights)
        for number, (at, arrival, name, fragment) in enumerate(merges, 1):
            stale = versions[fragment] - bases.get((name, fragment), 0)
            versions[fragment] += 1
            bases[name, fragment] = versions[fragment]
            member = ev.SyncMember(
                learner=name, generation=1, state="ACTIVE", arrived_seconds=0.0, samples=INNER_STEPS * BATCH,
                staleness=stale,
            )  # fmt: skip
            self.say(
                ev.SyncMerged, at=at, source="syncer", round=number, fragment=fragment,
                fragment_version=versions[fragment], epoch=1, members=[member], open_seconds=grace,
                merge_seconds=merge, durable_seconds=durable, outer_gradient_norm=3.0 / (1 + number / 20),
                momentum_cosine=0.4 + 0.1 * self.random.random(), share=1 / 3, samples_total=number * 640,
                theta_sha256="a" * 64, bytes_in=1_900_000,
            )  # fmt: skip
            self.say(
                ev.Applied, at=at + LATENCY_SECONDS / 2, source=f"rank/{name}/0", learner=name,
                round=versions[fragment], fragment=fragment, theta_sha256="b" * 64,
                waited_seconds=at - arrival + LATENCY_SECONDS, verdict="merged",
            )  # fmt: skip
        self.say(
            ev.SyncLedger, at=merges[-1][0] + 1, source="syncer", round=len(merges),
            merged={name: sum(one[2] == name for one in merges) * INNER_STEPS * BATCH for name in NAMES},
            discarded=dict.fromkeys(NAMES, 0), final=True, model_sha256="a" * 64,
        )  # fmt: skip


def write_decoupled_run(folder: Path, *, fragments: int = 2, seconds: float = 80.0) -> Path:
    """A whole run folder below `folder`."""
    plan = decoupled_plan(fragments=fragments)
    made = _Simulation(fragments, random.Random(11))
    made.say(ev.RunStatus, at=0.0, source="supervisor", status="running")
    for name in NAMES:
        made.learner(name, until=seconds)
    made.merges()
    made.say(ev.RunStatus, at=seconds + 6, source="supervisor", status="succeeded", exit_code=0)
    run = folder / plan.experiment / plan.run
    run.mkdir(parents=True)
    events = sorted(made.events, key=lambda one: one.time)
    (run / "plan.json").write_text(plan.write_json())
    (run / "events.jsonl").write_text("".join(ev.write_event(one) for one in events))
    (run / "summary.json").write_text(fold(events, plan, versions={}).write_json())
    return run
