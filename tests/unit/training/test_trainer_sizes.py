"""Training on pictures of several shapes, each near to its own: real ranks and a real syncer. Slow: they train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.prepare.__main__ import main as prepare
from spec import events as ev
from spec.buckets import equal_cost, make_sizes
from spec.events import write_event
from spec.fold import fold
from storage import open_bucket
from tests.builders.pictures import photographs
from tests.builders.trainer_runs import GATED, TrainerRun, Zygote, allow
from training.checkpoint import store
from training.data.audit import audit_run
from training.data.proof import Proof
from training.models.flow import sample
from training.models.weights import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
BATCH, SIDE = 15, 16
TRAIN: dict[str, Any] = {
    "batch": BATCH, "warmup_samples": 0, "prefetch_batches": 3,
    "model": {"width": 32, "depth": 2, "heads": 2, "conditioning": "class", "image_size": SIDE, "channels": 3},
}  # fmt: skip
BUCKETS = equal_cost(make_sizes(SIDE * SIDE, step=4, most_aspect=2), pixels=BATCH * SIDE * SIDE)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `gkr data prepare` makes of three hundred JPEG files."""
    folder = tmp_path_factory.mktemp("data")
    source = photographs(folder / "source", count=300)
    manifest = f"{folder.as_uri()}/data/photographs/manifest.json"
    assert prepare(["--source", source, "--manifest", manifest, "--rules", '{"held_out": 0.2}']) == 0
    return folder / "data"


@pytest.fixture
def run(zygote: Zygote, data: Path, tmp_path: Path) -> Iterator[TrainerRun]:
    """East has one rank, west two; every third step there is a checkpoint."""
    made = TrainerRun(
        tmp_path, zygote=zygote, uri=tmp_path.as_uri(), worlds={"east": 1, "west": 2}, samples=60 * BATCH,
        sync={"inner_steps": 5}, train=TRAIN,
    )  # fmt: skip
    manifest = f"{data.as_uri()}/photographs/manifest.json"
    learners = [one.model_copy(update={"data_manifest": manifest}) for one in made.plan.learners]
    made.plan = made.plan.model_copy(update={"learners": learners, "buckets": BUCKETS})
    (tmp_path / "plan.json").write_text(made.plan.write_json())
    yield made
    made.close()


def proofs(run: TrainerRun, folder: Path) -> list[Proof]:
    """By the audit, of what the run's events say."""
    folder.mkdir()
    (folder / "plan.json").write_text(run.plan.write_json())
    lines = [write_event(one) for name in run.worlds for one in run.events(name)]
    (folder / "events.jsonl").write_text("\n".join(lines))
    return audit_run(folder)


def test_learners_train_on_every_shape_in_its_own_size_and_the_audit_finds_all_of_it(
    run: TrainerRun, tmp_path: Path
) -> None:
    assert len({one.batch for one in BUCKETS}) > 1, "steps of unequal size"
    run.train()
    found = fold(run.all_events(), run.plan)
    assert found.sync is not None
    assert found.sync.learners_agree, run.logs()
    assert found.sync.ledger_imbalance == 0
    for one in found.learners:
        finished = run.of(ev.LearnerFinished, one.name)[-1]
        assert finished.position == one.samples
        assert one.samples != one.steps * BATCH
    losses = [one.loss for one in run.of(ev.Validation, "east")]
    assert losses[-1] < 0.9 * losses[0]
    for one in proofs(run, tmp_path / "audited"):
        assert not one.problems
        assert one.samples == one.position > 300, "more than an epoch"
    draws_every_size(run)


def test_without_sizes_every_image_is_the_models_square(run: TrainerRun) -> None:
    assert run.plan.train is not None
    train = run.plan.train.model_copy(update={"samples": 160, "batch": 16})
    run.plan = run.plan.model_copy(update={"buckets": [], "train": train})
    (run.folder / "plan.json").write_text(run.plan.write_json())
    run.train()
    first, last = (run.of(ev.Validation, name)[-1] for name in ("east", "west"))
    assert first.loss == pytest.approx(last.loss, rel=1e-4), "one rank and two judge by the same images"


def draws_every_size(run: TrainerRun) -> None:
    """By the published model."""
    newest = max(Path(run.folder / "run" / "sync" / "models").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    model, _ = load_model(newest)
    for one in BUCKETS:
        noise = torch.randn(2, 3, one.height, one.width, generator=torch.Generator().manual_seed(0))
        drawn = sample(model, noise=noise, condition=torch.tensor([1, 2]), steps=2, guidance=2.0)
        assert drawn.shape == noise.shape
        assert drawn.isfinite().all()


def test_a_killed_learner_goes_on_exactly_with_another_number_of_ranks(run: TrainerRun, tmp_path: Path) -> None:
    allow(run.folder, 2)  # both stand at step 15 until a new west has begun
    syncer = run.syncer(program=("-c", GATED))
    ranks = {name: run.ranks(name) for name in run.worlds}
    run.until(lambda: len(run.of(ev.CheckpointSaved, "west")) >= 3)
    run.end("west", ranks["west"], kill=True)
    learners = [one.model_copy(update={"world_size": 3}) if one.name == "west" else one for one in run.plan.learners]
    run.plan, run.worlds["west"] = run.plan.model_copy(update={"learners": learners}), 3
    (run.folder / "plan.json").write_text(run.plan.write_json())
    ranks["west"] = run.ranks("west")
    run.until(lambda: len(run.of(ev.Restored, "west")) == 2)
    allow(run.folder, 10**9)
    for name in run.worlds:
        run.until(lambda name=name: all(one.code is not None for one in ranks[name]))
        run.end(name, ranks[name])
    assert syncer.wait(30) == 0, run.logs()
    first, second = run.of(ev.Restored, "west")
    assert (first.step, first.position) == (0, 0)
    assert second.step > 0
    before = {one.step: one.position for one in run.of(ev.StepMetrics, "west") if one.attempt == 1}
    assert before[second.step] == second.position, "steps are counted on as if nothing had been"
    east, west = proofs(run, tmp_path / "audited")
    assert (east.problems, west.problems) == ([], [])
    assert west.attempts == 2
    summary = fold(run.all_events(), run.plan)
    assert summary.sync is not None
    assert summary.sync.ledger_imbalance == 0
    bucket = open_bucket(run.plan.learner("west").checkpoints)
    place = next(place for place in store.places(bucket) if store.is_committed(bucket, place=place))
    assert store.read_manifest(bucket, place=place).state["starts"], "so that the next attempt need not begin at zero"
