"""Loading: exact resumption, another world size, and every kind of damage a kill in the middle of a save can leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spec.errors import DataError, UnreachableError
from spec.train import ModelConfig
from storage import Bucket, file_path
from tests.builders.object_store import ObjectServer, environment_of
from tests.builders.worlds import run_worlds, whole
from tests.unit.training.checkpoint.conftest import Learner, flip, truncate
from training.checkpoint import CheckpointWriter
from training.checkpoint.store import Place

Make = Callable[..., Learner]


Damage = Callable[[Bucket, str], None]


def _flip(name: str) -> Damage:
    return lambda bucket, folder: flip(bucket, f"{folder}/{name}")


def _truncate(name: str) -> Damage:
    return lambda bucket, folder: truncate(bucket, f"{folder}/{name}", by=40)


def _remove(*names: str) -> Damage:
    return lambda bucket, folder: bucket.delete([f"{folder}/{name}" for name in names])


DAMAGE: dict[str, tuple[Damage, str | None]] = {
    "killed before COMMIT": (_remove("COMMIT"), None),
    "killed before MANIFEST": (_remove("COMMIT", "MANIFEST.json"), None),
    "torn COMMIT": (_truncate("COMMIT"), "COMMIT cannot be read"),
    "changed manifest": (_flip("MANIFEST.json"), "not the one that COMMIT names"),
    "lost manifest": (_remove("MANIFEST.json"), "there is no such"),
    "flipped bit": (_flip("rank-0.safetensors"), "has the digest"),
    "truncated part": (_truncate("rank-0.safetensors"), "bytes, the manifest says"),
    "lost part": (_remove("rank-0.safetensors"), "there is no such"),
}


def _save_two(make: Make, writer: CheckpointWriter) -> tuple[Learner, list[Any]]:
    """Checkpoints after steps 2 and 4; the state at each."""
    learner, states = make(), []
    for _ in range(2):
        learner.train(2)
        states.append(learner.everything().clone())
        learner.save(writer)
    assert writer._wait_idle(20)
    return learner, states


def test_a_resumed_learner_takes_the_same_steps_bit_for_bit(
    make: Make, writer: CheckpointWriter, saved: Bucket
) -> None:
    learner, _ = _save_two(make, writer)
    resumed = make()
    loaded = resumed.load(saved)
    assert loaded is not None
    assert (loaded.step, loaded.skipped, loaded.path.rpartition("/")[2]) == (4, [], "e1-a1")
    assert loaded.state == {"position": 48, "rounds": {"seq": 3}}
    assert resumed.optimizer.steps == 4
    assert learner.train(3) == resumed.train(3)
    assert learner.everything().equal(resumed.everything())


def test_nothing_committed_is_not_an_error(make: Make, saved: Bucket) -> None:
    assert make().load(saved) is None


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_the_newest_leads_to_the_one_before(
    make: Make, writer: CheckpointWriter, saved: Bucket, kind: str
) -> None:
    damage, reason = DAMAGE[kind]
    _, states = _save_two(make, writer)
    damage(saved, Place(epoch=1, attempt=1, step=4).key)
    resumed = make()
    loaded = resumed.load(saved)
    assert loaded is not None
    assert loaded.step == 2
    assert resumed.everything().equal(states[0])
    assert len(loaded.skipped) == (reason is not None)
    if reason:
        assert loaded.skipped[0].startswith("step 4 (e1-a1): ")
        assert reason in loaded.skipped[0]


def test_when_nothing_verifies_the_model_is_untouched_and_the_error_names_all(
    make: Make, writer: CheckpointWriter, saved: Bucket
) -> None:
    _save_two(make, writer)
    for step in (2, 4):
        flip(saved, f"{Place(epoch=1, attempt=1, step=step).key}/rank-0.safetensors")
    resumed = make()
    before = resumed.everything().clone()
    with pytest.raises(DataError, match=r"no committed checkpoint verifies: step 4 .*; step 2 .*") as caught:
        resumed.load(saved)
    assert "move it away" in str(caught.value)
    assert resumed.everything().equal(before)


def test_another_model_is_refused_rather_than_started_afresh(
    make: Make, writer: CheckpointWriter, saved: Bucket
) -> None:
    _save_two(make, writer)
    wider = make(model=ModelConfig(width=48, depth=2, heads=2, text_width=16))
    with pytest.raises(DataError, match=r"as \[16\], the model needs \[24\]"):
        wider.load(saved)


def test_a_vector_that_was_not_saved_is_missing(make: Make, writer: CheckpointWriter, saved: Bucket) -> None:
    learner = make()
    writer.save(
        step=1, model=learner.network, optimizer=learner.optimizer, ema=learner.ema, state={}, vectors={}
    )  # fmt: skip
    assert writer._wait_idle(20)
    loaded = make().load(saved)
    assert loaded is not None
    assert loaded.vectors == {}


def test_a_store_that_is_away_is_no_damage(
    make: Make, writer: CheckpointWriter, saved: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falling back to an older checkpoint would lose steps for nothing. A disk that fails to read is damage."""
    _save_two(make, writer)
    read = saved.read

    def away(key: str) -> bytearray:
        if "step-00000004" in key:
            raise UnreachableError("no answer")
        return read(key)

    monkeypatch.setattr(saved, "read", away)
    if file_path(saved.uri) is None:
        with pytest.raises(UnreachableError, match="no answer"):
            make().load(saved)
    else:
        loaded = make().load(saved)
        assert loaded is not None
        assert (loaded.step, loaded.skipped) == (2, ["step 4 (e1-a1): no answer"])


@pytest.fixture(scope="module", params=["folder", "objects"])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Written by 2 x 2 ranks, read by 4, 2 and 1, and by 2 with one part damaged; each rank is a process of its own."""
    folder = tmp_path_factory.mktemp("worlds")
    if request.param == "folder":
        return run_worlds("checkpoints", folder, uri=(folder / "saved").as_uri())
    find: Callable[[str], ObjectServer] = request.getfixturevalue
    server = find("server")
    with environment_of(server):
        return run_worlds("checkpoints", folder, uri=server.uri())


def test_only_the_coordinator_reports_a_commit(worlds: dict[str, Any]) -> None:
    assert [len(worlds[f"2x2-{rank}"]["outcomes"]) for rank in range(4)] == [2, 0, 0, 0]
    assert all(one.startswith("SavedCheckpoint") for one in worlds["2x2-0"]["outcomes"])


@pytest.mark.parametrize("label", ["4", "2", "1"])
def test_any_world_size_takes_up_the_same_elements(worlds: dict[str, Any], label: str) -> None:
    assert worlds[f"{label}-0"]["step"] == 3
    assert worlds[f"{label}-0"]["names"] == ["anchor"]
    for key in ("weights", "exp_avg_sq", "ema", "anchor"):
        saved, taken = whole(worlds, "2x2", key), whole(worlds, label, key)
        assert all((saved[name] == taken[name]).all() for name in saved), key


@pytest.mark.parametrize("label", ["4", "2", "1"])
def test_any_world_size_goes_on_as_if_nothing_had_happened(worlds: dict[str, Any], label: str) -> None:
    straight, resumed = worlds["2x2-0"]["results"][3:], worlds[f"{label}-0"]["results"]
    np.testing.assert_allclose(resumed, straight, rtol=1e-5)


def test_damage_that_one_rank_sees_makes_all_fall_back(worlds: dict[str, Any]) -> None:
    """The damaged part belongs to rank 1 alone; rank 0 could have read its own."""
    for rank in (0, 1):
        one = worlds[f"damaged-{rank}"]
        assert one["step"] == 2
        assert one["state"] == {"position": 24}
        assert ["rank-1.safetensors has the digest" in reason for reason in one["skipped"]] == [True]
    np.testing.assert_allclose(worlds["damaged-0"]["results"], worlds["2x2-0"]["results"][2:], rtol=1e-5)
