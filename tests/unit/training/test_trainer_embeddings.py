"""Training on embeddings that were stored when the dataset was prepared. Slow: real ranks train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.directory import write_directory
from services.prepare.encoded import Job, advance
from services.server import Server
from spec import events as ev
from spec.plan import ServicePlan
from spec.preparation import PrepareRules
from spec.services import Directory, Replica
from storage.datasets import read_manifest
from tests.builders.encoder_doubles import WIDTH, EncoderDouble
from tests.builders.pictures import photographs
from tests.builders.sync_world import wait_until
from tests.builders.trainer_runs import BATCH, DEADLINE, TrainerRun, Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SERVICE = ServicePlan(name="encoder", kind="encode", replicas=1, cpu=0.1, memory=2**20, queue_depth=8, max_batch=64)
TRAIN: dict[str, Any] = {
    "warmup_samples": 0,
    "model": {"width": 32, "depth": 2, "heads": 2, "text_width": WIDTH, "image_size": 16, "channels": 3},
}


@pytest.fixture
def run(zygote: Zygote, tmp_path: Path) -> Iterator[TrainerRun]:
    """One learner of two ranks, on a dataset with embeddings of `encoder-1`."""
    manifest = f"{tmp_path.as_uri()}/photographs/manifest.json"
    job = Job(photographs(tmp_path / "source", count=80), manifest, PrepareRules(held_out=0.2, embed="captions"))
    assert advance(job, embedders=EncoderDouble().embedders()).done
    folder = tmp_path / "run"
    folder.mkdir()
    made = TrainerRun(
        folder, zygote=zygote, uri=tmp_path.as_uri(), worlds={"east": 2}, samples=10 * BATCH, sync={"inner_steps": 5},
        train=TRAIN,
    )  # fmt: skip
    east = made.plan.learners[0].model_copy(update={"data_manifest": manifest, "services": [SERVICE]})
    made.plan = made.plan.model_copy(update={"learners": [east]})
    (folder / "plan.json").write_text(made.plan.write_json())
    yield made
    made.close()


def publish(run: TrainerRun, server: Server) -> None:
    replica = Replica(service="encoder", kind="encode", index=0, endpoint=server.endpoint, incarnation=1)
    write_directory(run.node_dir("east") / "services.json", directory=Directory(epoch=1, replicas=[replica]))


def test_no_caption_that_is_trained_on_is_sent_to_the_encoder(run: TrainerRun) -> None:
    encoder = EncoderDouble()
    held_out = read_manifest(run.plan.learners[0].data_manifest).count("test")
    with Server(encoder, queue_depth=8) as server:
        syncer, ranks = run.syncer(), run.ranks("east")
        publish(run, server)
        run.until(lambda: all(one.code is not None for one in ranks))
        run.end("east", ranks)
        assert syncer.wait(30) == 0, run.logs()
    assert len(encoder.captions) == 1 + held_out // 2 * 2, "the first request, and validation's"
    (finished,) = run.of(ev.LearnerFinished, "east")
    assert finished.step == 10
    assert "encode" not in finished.blocked_seconds


def test_a_dataset_of_another_encoder_is_refused_before_the_first_step(run: TrainerRun) -> None:
    encoder = EncoderDouble()
    encoder.fingerprints = ["encoder-2"]
    with Server(encoder, queue_depth=8) as server:
        run.syncer()
        ranks = run.ranks("east")
        publish(run, server)
        wait_until(lambda: any(one.code is not None for one in ranks), seconds=DEADLINE)
    assert {one.code for one in ranks} & {3}, run.logs()
    assert "embeddings are of encoder encoder-1, the experiment's encoding service is encoder-2" in run.logs()
    assert "gkr data prepare ... --embed captions --encoder" in run.logs()
    assert not run.of(ev.StepMetrics, "east")
