"""Saving beside training: what is reported, what is copied, and what a failure leaves."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from storage import Bucket, file_path, open_bucket
from storage.folder import Folder
from tests.builders.object_store import QUICK, environment_for
from tests.unit.training.checkpoint.conftest import Learner, names
from training.checkpoint import CheckpointFailure, CheckpointWriter, SavedCheckpoint, parts, store
from training.checkpoint.documents import Receipt
from training.checkpoint.store import Place
from training.processes import free_port

Make = Callable[..., Learner]


def _ended(writer: CheckpointWriter) -> list[SavedCheckpoint | CheckpointFailure]:
    assert writer._wait_idle(20)
    return writer.poll()


def test_a_save_reports_its_commit_once_with_its_times(make: Make, writer: CheckpointWriter, saved: Bucket) -> None:
    learner = make()
    learner.train(1)
    learner.save(writer)
    (one,) = _ended(writer)
    assert isinstance(one, SavedCheckpoint)
    key = "step-00000001/e1-a1"
    assert one.path == f"{file_path(saved.uri) or saved.uri}/{key}"
    assert one.bytes == saved.digest(f"{key}/rank-0.safetensors")[0]
    assert 0 < one.blocked_seconds < one.seconds
    assert writer.poll() == []
    assert names(saved, key) == [
        "COMMIT", "MANIFEST.json", "rank-0.json", "rank-0.safetensors",
    ]  # fmt: skip


def test_what_is_saved_is_the_state_at_the_call(
    make: Make, writer: CheckpointWriter, saved: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held back until training has gone on."""
    release = threading.Event()
    write = parts.write_part

    def late(*place: Any, **options: Any) -> tuple[int, str]:
        assert release.wait(20)
        return write(*place, **options)

    monkeypatch.setattr("training.checkpoint.writer.write_part", late)
    learner = make()
    learner.train(2)
    then = learner.everything().clone()
    learner.save(writer)
    learner.train(2)
    release.set()
    assert writer._wait_idle(20)
    other = make()
    assert other.load(saved)
    assert other.everything().equal(then)
    assert not learner.everything().equal(then)


def test_a_save_waits_for_the_one_before(make: Make, writer: CheckpointWriter) -> None:
    learner = make()
    for _ in range(3):
        learner.train(1)
        learner.save(writer)
    outcomes = _ended(writer)
    assert [type(one) for one in outcomes] == [SavedCheckpoint] * 3
    assert [one.step for one in outcomes] == [1, 2, 3]


def test_only_the_newest_are_kept(make: Make, writer: CheckpointWriter, saved: Bucket) -> None:
    learner = make()
    for _ in range(4):
        learner.train(1)
        learner.save(writer)
    _ended(writer)
    assert [place.step for place in store.places(saved)] == [4, 3]


def test_state_that_is_not_json_is_refused_at_the_call(make: Make, writer: CheckpointWriter) -> None:
    learner = make()
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.save(
            step=1,
            model=learner.network,
            optimizer=learner.optimizer,
            ema=learner.ema,
            state={"x": object()},
            vectors={},
        )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds one small checkpoint and not two; without root, the test limits file sizes instead."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
        ).returncode
        == 0
    ):
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    yield folder


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(make: Make, small_disk: Path) -> None:
    learner = make()
    learner.train(1)
    bucket = Folder(small_disk)
    writer = CheckpointWriter(bucket, keep=2, rank=0, world_size=1, epoch=1, attempt=1, deadline_seconds=10)
    learner.save(writer)
    (first,) = _ended(writer)
    assert isinstance(first, SavedCheckpoint)
    then = learner.everything().clone()
    learner.train(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.path.ismount(small_disk):
        assert 1 < (2**20) / first.bytes < 2, "the disk must hold one and not two"
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (first.bytes // 2, limits[1]))
    try:
        learner.save(writer)
        (second,) = _ended(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(second, CheckpointFailure)
    assert second.step == 2
    assert "the disk is full" in second.reason
    learner.train(1)
    assert [place.step for place in store.places(bucket)] == [1], "what the failed save held is free again"
    other = make()
    loaded = other.load(bucket)
    assert loaded is not None
    assert (loaded.step, loaded.skipped) == (1, [])
    assert other.everything().equal(then)
    assert writer.close(timeout_seconds=5) == []


def _two_ranks(root: Bucket, *, deadline_seconds: float) -> CheckpointWriter:
    return CheckpointWriter(root, keep=2, rank=0, world_size=2, epoch=1, attempt=1, deadline_seconds=deadline_seconds)


def test_a_rank_that_never_answers_fails_the_save_at_the_deadline(make: Make, saved: Bucket) -> None:
    learner = make()
    writer = _two_ranks(saved, deadline_seconds=0.2)
    learner.save(writer)
    (failure,) = writer.close(timeout_seconds=10)
    assert isinstance(failure, CheckpointFailure)
    assert "no receipt from rank 1 within 0.2 s" in failure.reason
    assert store.places(saved) == []


def test_a_rank_that_reports_an_error_fails_the_save_at_once(make: Make, saved: Bucket) -> None:
    learner = make()
    key = f"{Place(epoch=1, attempt=1, step=0).key}/rank-1.json"
    saved.put(key, Receipt(rank=1, error="the disk is full").write_json().encode())
    writer = _two_ranks(saved, deadline_seconds=60)
    learner.save(writer)
    (failure,) = writer.close(timeout_seconds=10)
    assert isinstance(failure, CheckpointFailure)
    assert "rank 1 could not write its part: the disk is full" in failure.reason


def test_parts_that_overlap_are_never_committed(make: Make, saved: Bucket) -> None:
    """Two ranks that each believe to hold everything."""
    learner = make()
    other = CheckpointWriter(saved, keep=2, rank=1, world_size=2, epoch=1, attempt=1, deadline_seconds=10)
    writer = _two_ranks(saved, deadline_seconds=10)
    learner.save(other)
    learner.save(writer)
    (failure,) = writer.close(timeout_seconds=10)
    assert isinstance(failure, CheckpointFailure)
    assert "the parts do not make the model: rank 1 wrote again" in failure.reason
    other.close(timeout_seconds=10)
    assert store.places(saved) == []


def test_a_folder_that_cannot_be_made_is_reported(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    learner = make()
    writer = CheckpointWriter(Folder(tmp_path / "file"), keep=2, rank=0, world_size=1, epoch=1, attempt=1)
    learner.save(writer)
    (failure,) = writer.close(timeout_seconds=10)
    assert isinstance(failure, CheckpointFailure)
    assert "Not a directory" in failure.reason


def test_a_store_that_is_away_costs_one_checkpoint_and_not_the_run(make: Make) -> None:
    learner = make()
    away = open_bucket("s3://bucket/x", environment=environment_for(free_port()), limits=QUICK)
    writer = CheckpointWriter(away, keep=2, rank=0, world_size=1, epoch=1, attempt=1, deadline_seconds=10)
    learner.save(writer)
    (failure,) = writer.close(timeout_seconds=30)
    assert isinstance(failure, CheckpointFailure)
    assert "the object store failed" in failure.reason


def test_more_vectors_must_lie_over_the_same_ranges(make: Make, writer: CheckpointWriter) -> None:
    learner = make()
    with pytest.raises(AssertionError, match=r"vector\.anchor does not have this rank's"):
        writer.save(
            step=1,
            model=learner.network,
            optimizer=learner.optimizer,
            ema=learner.ema,
            state={},
            vectors={"anchor": torch.zeros(3)},
        )
