"""Claim: on the toy task of cross-region.md (appendix A) merging costs no loss: barrier is within 1 % of data-parallel
training on the same data, decoupled with rebase hides a latency of a quarter of a round, bf16 and int8 displacements
train like float32 ones. And what the rules are there for: overwriting throws steps away, momentum for each contribution
diverges.

Every run is the production merge, outer optimizer, codec and adoption rules on a simulated clock
(`tests/builders/sync_sim.py`): 4 learners, 800 steps each, 20 to a round, momentum 0.7. Loss on 4,096 held-out points,
mean of the seeds; `spread` is the standard error. Run `python -m benchmarks.sync_toy`; writes
benchmarks/results/sync_toy.json.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from tests.builders.sync_sim import FOREVER, Outcome, World, simulate
from tests.builders.toy_task import Task, initial_weights, make_inners, train_together

SEEDS = range(6)
UNEVEN = (1.0, 1.3, 2.6, 5.7)
RESULTS = Path(__file__).parent / "results" / "sync_toy.json"
WORLDS = {
    "barrier": World(),
    "barrier, bf16": World(codec="bf16"),
    "barrier, int8": World(codec="int8"),
    "barrier, 4 fragments": World(fragments=4),
    "decoupled, latency 0, endless grace": World(mode="decoupled", grace=FOREVER),
    "decoupled, latency 0": World(mode="decoupled"),
    "decoupled, latency 2 x 2.5, rebase": World(mode="decoupled", latency=2.5),
    "decoupled, latency 2 x 2.5, rebase, bf16": World(mode="decoupled", latency=2.5, codec="bf16"),
    "decoupled, latency 2 x 2.5, rebase, int8": World(mode="decoupled", latency=2.5, codec="int8"),
    "decoupled, latency 2 x 2.5, rebase, grace 5": World(mode="decoupled", latency=2.5, grace=5),
    "decoupled, latency 2 x 2.5, rebase, 4 fragments": World(mode="decoupled", latency=2.5, fragments=4),
    "decoupled, latency 2 x 2.5, overwrite": World(mode="decoupled", latency=2.5, adopt="overwrite"),
    "decoupled, latency 2 x 7.5, rebase": World(mode="decoupled", latency=7.5),
    "decoupled, latency 2 x 7.5, overwrite": World(mode="decoupled", latency=7.5, adopt="overwrite"),
    "decoupled, uneven steps, rebase, grace 5": World(mode="decoupled", latency=2.5, grace=5, step_times=UNEVEN),
    "decoupled, momentum for each contribution": World(mode="decoupled", latency=2.5, momentum_per_contribution=True),
}


def main() -> None:
    """Measure, print, write."""
    task = Task()
    together = [task.loss(train_together(task, seed=seed, steps=800)) for seed in SEEDS]
    rows = [describe("data-parallel, the same data", together, together=together, outcomes=[])]
    for name, world in WORLDS.items():
        outcomes = [simulate(initial_weights(), make_inners(task, seed=seed), world) for seed in SEEDS]
        losses = [task.loss(one.theta) for one in outcomes]
        rows.append(describe(name, losses, together=together, outcomes=outcomes))
    print(f"{'run':48} {'loss':>7} {'spread':>7} {'to data-parallel':>16} {'merges':>6} {'lost':>5} {'MB sent':>8}")
    for row in rows:
        print(
            f"{row['run']:48} {row['loss']:7.4f} {row['spread']:7.4f} {row['to_data_parallel'] - 1:+16.2%} "
            f"{row['merges']:6.0f} {row['lost_share']:5.1%} {row['megabytes_sent']:8.1f}"
        )
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "seeds": len(SEEDS), "rows": rows}, indent=1) + "\n")


def describe(name: str, losses: list[float], *, together: list[float], outcomes: list[Outcome]) -> dict[str, Any]:
    """One row of the table."""
    steps = len(outcomes) * WORLDS[name].steps * 4 if outcomes else 1
    return {
        "run": name,
        "loss": statistics.mean(losses),
        "spread": statistics.stdev(losses) / math.sqrt(len(losses)),
        "to_data_parallel": statistics.mean(losses) / statistics.mean(together),
        "merges": statistics.mean([len(one.moments) for one in outcomes] or [0]),
        "lost_share": sum(one.lost_steps for one in outcomes) / steps,
        "megabytes_sent": statistics.mean([one.bytes_sent / 1e6 for one in outcomes] or [0]),
    }


if __name__ == "__main__":
    main()
