"""Names, the one COMMIT, fencing by epoch, and what may be deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec.errors import DataError
from training.checkpoint import store
from training.checkpoint.documents import Manifest, Part
from training.checkpoint.parts import write_part
from training.checkpoint.store import Place


def _commit(root: Path, *, epoch: int, attempt: int, step: int, sealed: bool = True) -> Place:
    place = Place(epoch=epoch, attempt=attempt, step=step)
    folder = place.folder(root)
    folder.mkdir(parents=True)
    size, digest = write_part(folder / "rank-0.safetensors", vectors={"model": torch.ones(step)})
    if sealed:
        part = Part(
            rank=0, file="rank-0.safetensors", bytes=size, sha256=digest, vectors=["model"], ranges=[("a", 0, step)]
        )
        store.commit(
            root,
            manifest=Manifest(
                step=step, epoch=epoch, attempt=attempt, world_size=1, shapes={"a": [step]}, vectors=["model"],
                optimizer_steps=step, state={}, parts=[part],
            ),
        )  # fmt: skip
    return place


def test_newest_is_the_latest_attempt_even_at_an_earlier_step(tmp_path: Path) -> None:
    """An attempt that fell back to step 10 has given up what its predecessor did later."""
    old, new = _commit(tmp_path, epoch=1, attempt=1, step=40), _commit(tmp_path, epoch=2, attempt=2, step=20)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-00000040" / "notes").mkdir()
    assert store.places(tmp_path) == [new, old]
    assert store.places(tmp_path / "nothing") == []


def test_a_fenced_attempt_cannot_commit(tmp_path: Path) -> None:
    _commit(tmp_path, epoch=2, attempt=2, step=20)
    with pytest.raises(DataError, match="epoch 2 attempt 2 has committed step 20 already"):
        _commit(tmp_path, epoch=1, attempt=1, step=60)
    assert not store.is_committed(tmp_path, place=Place(epoch=1, attempt=1, step=60))


def test_commit_is_written_once(tmp_path: Path) -> None:
    place = _commit(tmp_path, epoch=1, attempt=1, step=5)
    manifest = store.read_manifest(tmp_path, place=place)
    with pytest.raises(FileExistsError):
        store.commit(tmp_path, manifest=manifest)
    assert not list(place.folder(tmp_path).glob(".*")), "no partial file stays"


@pytest.mark.parametrize(("name", "data"), [("COMMIT", b""), ("COMMIT", b'{"step":5,'), ("MANIFEST.json", b"{}")])
def test_a_torn_small_file_is_damage(tmp_path: Path, name: str, data: bytes) -> None:
    place = _commit(tmp_path, epoch=1, attempt=1, step=5)
    (place.folder(tmp_path) / name).write_bytes(data)
    with pytest.raises(DataError):
        store.read_manifest(tmp_path, place=place)


def test_a_copy_under_another_name_is_not_believed(tmp_path: Path) -> None:
    place = _commit(tmp_path, epoch=1, attempt=1, step=5)
    copy = Place(epoch=1, attempt=1, step=6)
    copy.folder(tmp_path).parent.mkdir()
    place.folder(tmp_path).rename(copy.folder(tmp_path))
    with pytest.raises(DataError, match=r"it is a copy of .*step-00000005"):
        store.read_manifest(tmp_path, place=copy)


def test_pruning_keeps_the_newest_that_look_whole_and_what_later_attempts_write(tmp_path: Path) -> None:
    steps = {step: _commit(tmp_path, epoch=1, attempt=1, step=step) for step in (1, 2, 3)}
    left_over = _commit(tmp_path, epoch=1, attempt=1, step=9, sealed=False)
    damaged = _commit(tmp_path, epoch=2, attempt=2, step=4)
    (damaged.folder(tmp_path) / "rank-0.safetensors").write_bytes(b"short")
    own = _commit(tmp_path, epoch=2, attempt=2, step=5)
    later = _commit(tmp_path, epoch=3, attempt=3, step=5, sealed=False)
    gone = store.prune(tmp_path, keep=2, own=own)
    assert gone == [left_over, steps[2], steps[1]]
    assert store.places(tmp_path) == [later, own, damaged, steps[3]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004", "step-00000005"]


def test_a_deletion_that_is_cut_short_leaves_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = _commit(tmp_path, epoch=1, attempt=1, step=5)

    def end_here(_folder: Path, *, ignore_errors: bool) -> None:
        assert ignore_errors

    monkeypatch.setattr(store.shutil, "rmtree", end_here)
    store.remove(tmp_path, place=place)
    assert not store.is_committed(tmp_path, place=place)
    assert (place.folder(tmp_path) / "MANIFEST.json").exists()
