"""The trainer and the syncer together, in both modes: real ranks over gloo, real kills. Slow: they import torch once
and train for real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.sync_blocked import HELD, HOLD_SECONDS
from services.prepare.__main__ import prepare
from spec.events import Applied, CheckpointSaved, LearnerFinished, Restored, StepMetrics, SyncMerged
from spec.fold import fold
from spec.summary import Summary
from spec.sync import SyncConfig
from storage import open_bucket
from tests.builders.sync_world import make_plan, wait_until
from tests.builders.trainer_runs import BATCH, GATED, TrainerRun, Zygote, allow
from training import trainer
from training.checkpoint import store
from training.progress import read_page
from training.sync.adopt import LearnerSyncState
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Layout
from training.sync.state import read_state
from training.sync.store import Head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
DECOUPLED = {"mode": "decoupled", "inner_steps": 5, "outer_momentum": 0.5}
FLAT = {"warmup_samples": 0}
"""No warm-up: its first displacements are so small that the next ones look ten times too large."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    manifest = f"{folder.as_uri()}/data/digits/manifest.json"
    prepare(manifest, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
    return folder / "data"


Start = Callable[..., TrainerRun]


@pytest.fixture
def start(zygote: Zygote, data: Path, tmp_path: Path) -> Iterator[Start]:
    """Makes runs, and leaves nothing of them."""
    runs: list[TrainerRun] = []

    def make(worlds: dict[str, int], *, steps: int, sync: dict[str, Any], train: dict[str, Any] | None = None) -> Any:
        (tmp_path / "data").symlink_to(data)
        run = TrainerRun(
            tmp_path, zygote=zygote, uri=tmp_path.as_uri(), worlds=worlds, samples=steps * BATCH, sync=sync,
            train={**FLAT, **(train or {})},
        )  # fmt: skip
        runs.append(run)
        return run

    yield make
    for one in runs:
        one.close()


def check_end(run: TrainerRun) -> Summary:
    """Bit-equal weights on all learners and nothing missing in the ledger."""
    found = fold(run.all_events(), run.plan)
    assert found.sync is not None
    assert found.sync.learners_agree, run.logs()
    assert found.sync.ledger_imbalance == 0, [one.ledger for one in found.learners]
    return found


def test_a_barrier_of_unequal_worlds_and_fragments(start: Start) -> None:
    run = start({"east": 1, "west": 2}, steps=20, sync={"inner_steps": 6, "fragments": 3})
    run.train()
    check_end(run)
    turns = [one.fragment for one in run.of(Applied, "east")]
    assert turns == [index % 3 for index in range(len(turns))]
    assert all(one.verdict == "merged" for one in run.of(Applied, "west"))


@pytest.mark.parametrize(
    "sync",
    [
        {},
        {"fragments": 3, "codec": "bf16", "inner_steps": 6},
        {"adopt": "overwrite", "codec": "int8", "ema": "syncer"},
    ],
    ids=["whole", "fragments", "overwrite"],
)
def test_decoupled_learners_of_unequal_worlds_end_with_equal_weights(start: Start, sync: dict[str, Any]) -> None:
    run = start({"east": 1, "west": 2}, steps=60, sync={**DECOUPLED, **sync})
    run.train()
    found = check_end(run)
    assert all(one.ledger.pending == 0 for one in found.learners), "what was pending came with the last contribution"
    assert run.plan.syncer is not None
    above = sum(one.ledger.merged for one in found.learners) - run.plan.syncer.target_samples
    assert 0 <= above <= len(run.worlds) * run.plan.syncer.round_samples, "at most a round of each learner"
    discarded = sum(one.ledger.discarded for one in found.learners)
    assert (discarded > 0) == ("adopt" in sync), "only overwriting drops the steps made while waiting"


def test_what_an_answer_makes_the_learner_give_up_near_the_end_is_trained_again(start: Start) -> None:
    """Merges take so long that the learner has trained all that the run needs when the first answer comes, and
    overwriting drops most of it. Everybody stood still for good when the syncer went on counting it.
    """
    run = start({"east": 1}, steps=15, sync={**DECOUPLED, "adopt": "overwrite"})
    run.train(program=("-c", HELD))
    found = check_end(run)
    assert found.learners[0].ledger.discarded > 0


def test_a_rank_and_the_syncer_are_killed_on_the_way(start: Start) -> None:
    run = start({"east": 1, "west": 2}, steps=120, sync={**DECOUPLED, "fragments": 2})
    allow(run.folder, 2)  # of each fragment: then they stand, and neither can finish before the kills
    syncer = run.syncer(program=("-c", GATED))
    ranks = {name: run.ranks(name) for name in run.worlds}
    run.until(lambda: len(run.of(SyncMerged)) >= 4 and run.of(CheckpointSaved, "west"))
    run.end("west", ranks["west"], kill=True)
    ranks["west"] = run.ranks("west")
    run.until(lambda: len(run.of(Restored, "west")) == 2)
    syncer.kill()
    syncer.wait(20)
    before = max(one.round for one in run.of(SyncMerged))
    syncer = run.syncer()
    run.until(lambda: max(one.round for one in run.of(SyncMerged)) > before)
    for name in run.worlds:
        run.until(lambda name=name: all(one.code is not None for one in ranks[name]))
        run.end(name, ranks[name])
    assert syncer.wait(30) == 0, run.logs()
    check_end(run)
    assert run.of(Restored, "west")[-1].mode in {"exact", "shared"}


def stop_in_flight(run: TrainerRun, *, inner_steps: int) -> Any:
    """The learner has run as far as it may without an answer, its newest checkpoint was made in flight."""
    allow(run.folder, 0)
    syncer = run.syncer(program=("-c", GATED))
    ranks = run.ranks("east")

    def blocked() -> bool:
        page = read_page(run.node_dir("east") / "progress-0.page")
        return page is not None and page.phase == "barrier" and page.step == 2 * inner_steps

    run.until(blocked)
    assert not run.of(SyncMerged)
    run.until(lambda: run.of(CheckpointSaved, "east") or newest(run))
    state = newest(run)
    assert state is not None
    assert state.in_flight == [0]
    assert state.fragments[0].seq == 1
    return syncer, ranks


def newest(run: TrainerRun) -> LearnerSyncState | None:
    bucket = open_bucket(run.plan.learners[0].checkpoints)
    for place in store.places(bucket):
        if store.is_committed(bucket, place=place):
            return LearnerSyncState.from_dict(store.read_manifest(bucket, place=place).state["rounds"])
    return None


@pytest.mark.parametrize("merged", [False, True], ids=["not merged", "merged"])
def test_a_learner_is_killed_while_its_contribution_is_in_flight(start: Start, *, merged: bool) -> None:
    """The checkpoint of step 19 holds ten steps in flight and nine more. Nothing of the contribution was merged: all 19
    go on. It was merged: the learner goes on behind it.
    """
    sync = {"mode": "decoupled", "inner_steps": 10, "max_ahead": 2}
    run = start({"east": 1}, steps=60, sync=sync, train={"checkpoint": {"every_steps": 19}})
    syncer, ranks = stop_in_flight(run, inner_steps=10)
    if merged:
        allow(run.folder, 1)  # the next one is held: there is no checkpoint behind step 19
        run.until(lambda: run.of(SyncMerged))
    run.end("east", ranks, kill=True)
    syncer.kill()
    syncer.wait(20)
    syncer = run.syncer()
    second = run.ranks("east")
    run.until(lambda: all(one.code is not None for one in second))
    run.end("east", second)
    assert syncer.wait(30) == 0, run.logs()
    restored = run.of(Restored, "east")[-1]
    if merged:
        assert restored.mode == "shared"
        assert restored.position % (10 * BATCH) == 0
        assert restored.position > 0
    else:
        assert (restored.mode, restored.position, restored.samples_lost) == ("exact", 19 * BATCH, BATCH)
    check_end(run)


def test_an_attempt_after_the_end_proves_that_it_holds_the_final_weights(start: Start) -> None:
    """Only east trains; west comes when all is over."""
    run = start({"east": 1, "west": 1}, steps=10, sync={"inner_steps": 5, "round_deadline": "1s"})
    run.syncer(until_final=False)
    for name in ("east", "west"):
        ranks = run.ranks(name)
        run.until(lambda ranks=ranks: all(one.code is not None for one in ranks))
        run.end(name, ranks)
    found = check_end(run)
    (late,) = run.of(LearnerFinished, "west")
    assert (late.step, late.round) == (0, 2)
    assert found.sync is not None
    assert late.theta_sha256 == found.sync.theta_sha256


def test_a_learner_that_stands_near_the_end_sees_that_it_is_fenced(start: Start) -> None:
    """East has trained what was left and waits for west when a newer process of east registers: the older one ends, it
    does not wait for the end of the run. West only says that it has trained its share, and never sends it: more than
    east may train too much, so that the run cannot drain.
    """
    steps = 10_000
    run = start({"east": 1, "west": 1}, steps=steps, sync={**DECOUPLED, "inner_steps": 20})
    run.syncer()
    (east,) = run.ranks("east")
    run.until(lambda: run.of(SyncMerged) and run.of(StepMetrics, "east"))
    control, bulk = (f"127.0.0.1:{port}" for port in run.ports)
    layout, contract = layout_of(run), contract_hash(run.plan)
    west, newer = (
        SyncClient(control, bulk=bulk, run="r1", learner=name, layout=layout, barrier_timeout_seconds=60)
        for name in ("west", "east")
    )
    seen: list[tuple[int, float]] = []

    def stands() -> bool:
        """East has made no step for two seconds."""
        page = read_page(run.node_dir("east") / "progress-0.page")
        if page is None:  # it is being written
            return False
        if page.phase != "barrier" or not seen or seen[-1][0] != page.step:
            seen.append((page.step, time.monotonic()))
        return time.monotonic() - seen[-1][1] > 2

    try:
        west.register(contract, world_size=1)
        share = steps - run.of(StepMetrics, "east")[-1].step - 100
        west.report(share, pending_samples=share * BATCH, kept_samples=share * BATCH, step_seconds=0.01)
        west.beat_soon()
        # All that was left is merged: it also stands where the syncer only pauses.
        run.until(lambda: stands() and newer.status().members[0].merged_samples >= (steps - share) * BATCH)
        assert newer.status().state == "SERVING"
        newer.register(contract, world_size=1)
        wait_until(lambda: east.code is not None, seconds=60)
        assert "a newer process speaks for this learner" in east.log.read_text()
    finally:
        for one in (west, newer):
            one.close()


def layout_of(run: TrainerRun) -> Layout:
    """Of the run's model, as the syncer's state has it."""
    folder = run.folder / "run" / "sync"
    (state,) = msgspec.json.decode((folder / "HEAD.json").read_bytes(), type=Head).states
    return read_state(folder / "states" / state.file, sha256=state.sha256)[1].layout


def test_learners_do_not_stand_still_for_a_slow_syncer(start: Start) -> None:
    """Every merge takes five seconds, in which they would stand still if they waited. How little is left besides is for
    `benchmarks.sync_blocked` to measure, on a machine that has nothing else to do.
    """
    run = start({"east": 1, "west": 1}, steps=10**6, sync={**DECOUPLED, "inner_steps": 20, "max_ahead": 1000})
    run.syncer(until_final=False, program=("-c", HELD))
    for name in run.worlds:
        run.ranks(name)
    run.until(lambda: len(run.of(SyncMerged)) >= 3 and all(run.of(Applied, name) for name in run.worlds))
    run.until(lambda: all(run.of(StepMetrics, name)[-1].time > run.of(SyncMerged)[2].time for name in run.worlds))
    for name in run.worlds:
        steps = run.of(StepMetrics, name)
        wall, blocked = steps[-1].time - steps[0].time, steps[-1].blocked_seconds
        assert wall > 2 * HOLD_SECONDS
        assert {cause: blocked.get(cause, 0.0) for cause in ("barrier", "max_ahead")} == {"barrier": 0, "max_ahead": 0}
        assert sum(blocked.get(cause, 0.0) for cause in ("snapshot", "apply")) < wall / 3


@pytest.mark.parametrize("given", ["10s", "10m", "2h"])
def test_no_rank_gives_up_before_rank_0_which_knows_what_is_missing(given: str, tmp_path: Path) -> None:
    """Its peers would end with words about a collective, and the run with a cause that helps nobody."""
    plan = make_plan(tmp_path, config=SyncConfig.model_validate({"barrier_timeout": given}))
    assert plan.syncer is not None
    assert trainer.collective_seconds(plan) >= 1.5 * plan.syncer.config.barrier_timeout
    assert trainer.collective_seconds(plan) >= trainer.COLLECTIVE_DEADLINE_SECONDS
