"""Claim: a slow syncer costs decoupled learners nothing, and barrier learners only what transfer and merge take.

The real trainer on the digits, two learners of one rank each, the real syncer. Decoupled: each merge is held for five
seconds; measured is the share of the wall time in which training stood still, by cause, between the first step and the
end's drain. Barrier: links of a given rate; measured is how long the learner that comes last stands still in a round,
against the bytes over the rate, both ways, plus the syncer's merge and write.

    python -m benchmarks.sync_blocked [--rounds 6]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from services.prepare.__main__ import prepare
from spec.events import Applied, LearnerFinished, StepMetrics, SyncMerged
from tests.builders.trainer_runs import BATCH, TrainerRun, Zygote

HOLD_SECONDS = 5.0
DECOUPLED_STEPS, BARRIER_STEPS = 200, 20
"""Inner steps of a round."""
RATE = 1_000_000
"""Bits per second of a learner's link, each way."""
WORLDS = {"east": 1, "west": 1}
DEADLINE_SECONDS = 600.0
HELD = f"""
import sys, threading
import training.sync.server as server
import training.sync.worker as worker
merge = worker.merge
def held(*args, **options):
    threading.Event().wait({HOLD_SECONDS})
    return merge(*args, **options)
worker.merge = held
sys.exit(server.main())
"""
"""The real syncer, but every merge begins late."""


def main() -> None:
    """Measure both and say what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="of the decoupled run; the barrier run has 5")
    options = parser.parse_args()
    zygote = Zygote.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            measured = {
                "decoupled": measure_decoupled(Path(folder) / "decoupled", zygote, rounds=options.rounds),
                "barrier": measure_barrier(Path(folder) / "barrier", zygote, rounds=5),
            }
    finally:
        zygote.close()
    measured["machine"] = {"platform": platform.platform(), "cores": os.cpu_count()}
    target = Path(__file__).parent / "results" / "sync_blocked.json"
    target.write_text(json.dumps(measured, indent=2) + "\n")
    decoupled, barrier = measured["decoupled"], measured["barrier"]
    print(
        f"decoupled, merges held for {HOLD_SECONDS:g} s: stood still {decoupled['blocked_share']:.2%} of the wall time"
    )
    print(f"  {decoupled['blocked_seconds']} in {decoupled['wall_seconds']:.0f} s; drain {decoupled['drain_seconds']}")
    print(f"barrier: {barrier['round_seconds']:.2f} s a round, transfer and merge {barrier['needed_seconds']:.2f} s")
    print(f"  ratio {barrier['overhead']:.2f}")


def run(folder: Path, zygote: Zygote, *, rounds: int, sync: dict[str, Any], program: tuple[str, ...]) -> TrainerRun:
    """Train; no checkpoints on the way, so that only the sync makes training stand still."""
    folder.mkdir()
    uri = folder.as_uri()
    prepare(f"{uri}/data/digits/manifest.json", source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    samples = rounds * sync["inner_steps"] * BATCH * len(WORLDS)
    train = {"log_every": 5, "checkpoint": {"every_steps": 100_000}}
    one = TrainerRun(
        folder, zygote=zygote, uri=uri, worlds=WORLDS, samples=samples, train=train,
        sync={"outer_momentum": 0.5, **sync},
    )  # fmt: skip
    try:
        one.train(program=program, seconds=DEADLINE_SECONDS)
    finally:
        one.close()
    return one


def measure_decoupled(folder: Path, zygote: Zygote, *, rounds: int) -> dict[str, Any]:
    """Standing still of the learner that stood most, and what the end took once."""
    sync = {"mode": "decoupled", "inner_steps": DECOUPLED_STEPS}
    one = run(folder, zygote, rounds=rounds, sync=sync, program=("-c", HELD))
    found: list[dict[str, Any]] = []
    for name in WORLDS:
        steps, end = one.of(StepMetrics, name), one.of(LearnerFinished, name)[-1]
        wall = steps[-1].time - steps[0].time
        causes = ("snapshot", "barrier", "apply", "max_ahead")
        blocked = {cause: steps[-1].blocked_seconds.get(cause, 0.0) for cause in causes}
        found.append(
            {
                "learner": name,
                "wall_seconds": wall,
                "steps": steps[-1].step,
                "blocked_seconds": blocked,
                "blocked_share": sum(blocked.values()) / wall,
                "drain_seconds": round(end.blocked_seconds.get("barrier", 0.0) - blocked["barrier"], 2),
                "answers": len(one.of(Applied, name)),
                "waited_seconds": statistics.median(applied.waited_seconds for applied in one.of(Applied, name)),
            }
        )
    return max(found, key=lambda each: each["blocked_share"])


def measure_barrier(folder: Path, zygote: Zygote, *, rounds: int) -> dict[str, Any]:
    """Per round, of the learner that waited least: the other one's wait is for its slower peer."""
    sync = {"inner_steps": BARRIER_STEPS, "bulk_rate": f"{RATE // 1_000_000}Mbit"}
    one = run(folder, zygote, rounds=rounds, sync=sync, program=("-m", "training.sync.server"))
    stood: dict[int, list[float]] = {}
    for name in WORLDS:
        by_version: dict[int, float] = {}
        """Seconds stood still until the learner goes on from the version after this one."""
        for step in one.of(StepMetrics, name):
            total = sum(step.blocked_seconds.get(cause, 0.0) for cause in ("snapshot", "barrier", "apply"))
            by_version[step.round] = total
        end = one.of(LearnerFinished, name)[-1].blocked_seconds
        by_version[rounds] = sum(end.get(cause, 0.0) for cause in ("snapshot", "barrier", "apply"))
        for version in range(1, rounds + 1):
            stood.setdefault(version, []).append(by_version[version] - by_version[version - 1])
    merges = {merge.round: merge for merge in one.of(SyncMerged)}
    sent = merges[1].bytes_in / len(WORLDS)
    fetched = sent / 2
    transfer = (sent + fetched) * 8 / RATE
    needed = [transfer + merge.merge_seconds + merge.durable_seconds for merge in merges.values()]
    rounds_seconds = [min(times) for version, times in stood.items() if version < rounds]
    return {
        "rounds": rounds,
        "bytes_sent": sent,
        "bytes_fetched": fetched,
        "rate_bits": RATE,
        "transfer_seconds": transfer,
        "needed_seconds": statistics.median(needed),
        "round_seconds": statistics.median(rounds_seconds),
        "overhead": statistics.median(rounds_seconds) / statistics.median(needed),
    }


if __name__ == "__main__":
    main()
