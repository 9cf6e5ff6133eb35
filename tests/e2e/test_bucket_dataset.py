"""A real run on a dataset in an object store, on a node whose cache holds less than half of it and is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.prepare.encoded import Job, advance
from spec.events import Event, Quarantined, StepMetrics
from spec.preparation import PrepareRules
from spec.shards import Manifest
from storage.cache import Cache
from storage.datasets import read_manifest
from tests.builders.follow import Follower
from tests.builders.object_store import ObjectServer, environment_of, serve_objects
from tests.builders.pictures import photographs
from training.data.audit import audit_run

ROOT = Path(__file__).resolve().parents[2]
MINUTE = 60.0
COUNT, SIDE, BATCH = 240, 16, 16
SAMPLES = 100 * BATCH
"""Eight epochs."""
EXPERIMENT = """
version: 1
name: photographs
learners:
  - name: east
    cluster: local-0
    groups:
      - {{name: trainer, nodes: 1, ranks: 2, resources: {{cpu: 1, memory: 2Gi, shm: 256Mi}}}}
train:
  samples: {samples}
  batch: {batch}
  warmup_samples: 0
  loader_workers: 1
  dtype: float32
  log_every: 5
  model: {{width: 32, depth: 2, heads: 2, conditioning: class, image_size: {side}, channels: 3}}
data: {{manifest: "{manifest}", cache_limit: {limit}Ki}}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    with serve_objects(tmp_path) as one, environment_of(one):
        yield one


def prepared(server: ObjectServer, tmp_path: Path) -> str:
    """What `gkr data prepare` makes of a folder of JPEG files: some thirty shards, in the bucket."""
    uri = f"{server.uri()}/photographs/manifest.json"
    rules = PrepareRules.model_validate({"held_out": 0.2, "shard_bytes": "8Ki"})
    assert advance(Job(photographs(tmp_path / "source", count=COUNT), uri, rules, work=tmp_path / "work")).done
    return uri


def limit_of(manifest: Manifest) -> int:
    """Room for the index and two fifths of the shards, of which a tenth stays free."""
    assert manifest.index is not None
    wanted = (manifest.index.bytes + 0.4 * sum(one.bytes for one in manifest.splits.train)) / 0.9
    return int(wanted) // 2**10 * 2**10


def damage(cache: Cache, *, but: str) -> int:
    """Overwrite all copies but one; how many."""
    copies = [one for one in cache.copies() if one.sha256 != but]
    for one in copies:
        with cache.path(one.sha256).open("r+b") as file:
            file.write(bytes(one.bytes))
    return len(copies)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_a_dataset_in_a_bucket_keeps_to_its_cache_and_tells_what_it_did(
    server: ObjectServer, tmp_path: Path
) -> None:
    """Slow because it trains for real: a learner of two ranks, each with a loader worker, and its syncer."""
    uri = prepared(server, tmp_path)
    manifest = read_manifest(uri)
    assert manifest.index is not None
    limit = limit_of(manifest)
    (tmp_path / "photographs.yaml").write_text(
        EXPERIMENT.format(samples=SAMPLES, batch=BATCH, side=SIDE, manifest=uri, limit=limit // 2**10)
    )
    cache, most = Cache(tmp_path / "cache"), 0

    def trained(events: list[Event]) -> StepMetrics | None:
        nonlocal most
        most = max(most, cache.taken_bytes())
        return next((one for one in events if isinstance(one, StepMetrics)), None)

    def gkr(*words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GKR_DATA_CACHE": str(cache.root)}
        with (tmp_path / "out.txt").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "gkr", *words], cwd=tmp_path, stdout=out, stderr=out, env=environment
            )

    run = gkr("launch", "photographs.yaml")
    follow = Follower(tmp_path / "runs" / "latest")
    try:
        follow.until(trained, deadline_seconds=3 * MINUTE, what="the first steps")
        assert damage(cache, but=manifest.index.sha256)
        until = time.monotonic() + 3 * MINUTE
        while run.poll() is None and time.monotonic() < until:
            most = max(most, cache.taken_bytes())
            with suppress(subprocess.TimeoutExpired):
                run.wait(0.05)
        code = run.poll()
    finally:
        if run.poll() is None:
            gkr("cancel", "--now").wait(MINUTE)
            run.kill()
            run.wait(MINUTE)
    folder = (tmp_path / "runs" / "latest").resolve()
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert (code, summary["status"]) == (0, "succeeded"), (tmp_path / "out.txt").read_text()
    assert 0.5 * limit < most <= limit
    (copies,) = [one["copies"] for one in summary["learners"]]
    assert copies["damaged"] > 0
    assert copies["hits"] > 0
    assert copies["range_bytes"] > 0
    assert "copies of its data" in (folder / "report.html").read_text()
    follow.read()
    assert not [one for one in follow.events if isinstance(one, Quarantined)], "the dataset has no damage"
    (proof,) = audit_run(folder, cache=cache.root)
    assert (proof.problems, proof.position) == ([], summary["learners"][0]["samples"])
