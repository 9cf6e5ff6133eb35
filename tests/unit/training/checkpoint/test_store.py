"""Names, the one COMMIT, fencing by epoch, and what may be deleted."""

from __future__ import annotations

import pytest
import torch

from spec.errors import DataError
from storage import Bucket, ExistsError, file_path
from tests.unit.training.checkpoint.conftest import names
from training.checkpoint import store
from training.checkpoint.documents import Manifest, Part, Receipt
from training.checkpoint.parts import write_part
from training.checkpoint.store import Place


def _commit(root: Bucket, *, epoch: int, attempt: int, step: int, sealed: bool = True) -> Place:
    place = Place(epoch=epoch, attempt=attempt, step=step)
    size, digest = write_part(root, f"{place.key}/rank-0.safetensors", vectors={"model": torch.ones(step)})
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


def test_newest_is_the_latest_attempt_even_at_an_earlier_step(saved: Bucket) -> None:
    """An attempt that fell back to step 10 has given up what its predecessor did later."""
    old, new = _commit(saved, epoch=1, attempt=1, step=40), _commit(saved, epoch=2, attempt=2, step=20)
    saved.put("step-x/e1-a1/COMMIT", b"")
    saved.put("step-00000040/notes/COMMIT", b"")
    assert store.places(saved) == [new, old]
    assert store.places(saved.below("nothing")) == []


def test_a_fenced_attempt_cannot_commit(saved: Bucket) -> None:
    _commit(saved, epoch=2, attempt=2, step=20)
    with pytest.raises(DataError, match="epoch 2 attempt 2 has committed step 20 already"):
        _commit(saved, epoch=1, attempt=1, step=60)
    assert not store.is_committed(saved, place=Place(epoch=1, attempt=1, step=60))


def test_commit_is_written_once(saved: Bucket) -> None:
    place = _commit(saved, epoch=1, attempt=1, step=5)
    manifest = store.read_manifest(saved, place=place)
    with pytest.raises(ExistsError):
        store.commit(saved, manifest=manifest)
    folder = file_path(saved.uri)
    assert folder is None or not list(folder.rglob(".*")), "no partial file stays"


@pytest.mark.parametrize(("name", "data"), [("COMMIT", b""), ("COMMIT", b'{"step":5,'), ("MANIFEST.json", b"{}")])
def test_a_torn_small_file_is_damage(saved: Bucket, name: str, data: bytes) -> None:
    place = _commit(saved, epoch=1, attempt=1, step=5)
    saved.put(f"{place.key}/{name}", data)
    with pytest.raises(DataError):
        store.read_manifest(saved, place=place)


def test_a_copy_under_another_name_is_not_believed(saved: Bucket) -> None:
    place = _commit(saved, epoch=1, attempt=1, step=5)
    copy = Place(epoch=1, attempt=1, step=6)
    for name in names(saved, place.key):
        saved.put(f"{copy.key}/{name}", saved.get(f"{place.key}/{name}").data)
    with pytest.raises(DataError, match=r"it is a copy of .*step-00000005"):
        store.read_manifest(saved, place=copy)


def test_pruning_keeps_the_newest_that_look_whole_and_what_later_attempts_write(saved: Bucket) -> None:
    steps = {step: _commit(saved, epoch=1, attempt=1, step=step) for step in (1, 2, 3)}
    left_over = _commit(saved, epoch=1, attempt=1, step=9, sealed=False)
    damaged = _commit(saved, epoch=2, attempt=2, step=4)
    saved.put(f"{damaged.key}/rank-0.safetensors", b"short")
    own = _commit(saved, epoch=2, attempt=2, step=5)
    later = _commit(saved, epoch=3, attempt=3, step=5, sealed=False)
    gone = store.prune(saved, keep=2, own=own)
    assert gone == [left_over, steps[2], steps[1]]
    assert store.places(saved) == [later, own, damaged, steps[3]]
    assert saved.folders() == ["step-00000003", "step-00000004", "step-00000005"]


def test_a_deletion_that_is_cut_short_leaves_no_commit(saved: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    place = _commit(saved, epoch=1, attempt=1, step=5)

    def end_here(_prefix: str) -> None:
        pass

    monkeypatch.setattr(saved, "clear", end_here)
    store.remove(saved, place=place)
    assert not store.is_committed(saved, place=place)
    assert saved.exists(f"{place.key}/MANIFEST.json")


def test_the_receipts_of_many_ranks_are_read_together(saved: Bucket) -> None:
    place = Place(epoch=1, attempt=1, step=5)
    for rank in range(40):
        saved.put(f"{place.key}/rank-{rank}.json", Receipt(rank=rank, error="x").write_json().encode())
    saved.put(f"{place.key}/rank-0.safetensors", b"")
    found = store.read_receipts(saved, place, ranks=set(range(1, 50)))
    assert sorted(one.rank for one in found) == list(range(1, 40))
    saved.put(f"{place.key}/rank-3.json", b"{")
    with pytest.raises(DataError, match="a receipt cannot be read"):
        store.read_receipts(saved, place, ranks={3})
