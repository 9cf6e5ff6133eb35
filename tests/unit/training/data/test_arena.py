"""Memory shared by a rank and its loader workers: nothing overwritten, nothing left, too much of it refused."""

from __future__ import annotations

import errno
import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec.errors import ConfigError
from spec.train import ModelConfig
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.data import loader as loader_module
from training.data.arena import Arena
from training.data.loader import Loader
from training.data.tickets import NO_SLOT
from training.preflight.measurements import Memory

SECONDS = 30.0
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """Forty pictures."""
    train = [Picture(encoded(picture(number, width=48, height=40)), 48, 40) for number in range(40)]
    return make_tar_dataset(tmp_path / "pictures", train=train)


def a_loader(dataset: str, **changes: Any) -> Loader:
    """Of batches that are large enough for the arena."""
    arguments: dict[str, Any] = {
        "seed": 3, "learner": "east", "start_position": 0, "batch": 8, "rank": 0, "world_size": 1, "workers": 2,
        "prefetch": 3, "model": ModelConfig(image_size=32, channels=3),
    }  # fmt: skip
    return Loader(dataset, **(arguments | changes))


def wanted(dataset: str, count: int) -> list[bytes]:
    with a_loader(dataset, workers=0) as loader:
        return [loader.next(SECONDS).images.tobytes() for _ in range(count)]


def arena_of(loader: Loader) -> Arena:
    assert loader._arena is not None
    return loader._arena


def test_a_slot_is_free_when_the_last_view_of_it_is_gone() -> None:
    arena = Arena(slot_bytes=100, slots=2, available=None)
    slots = [arena.take(), arena.take()]
    assert arena.take() == NO_SLOT
    view = arena.lend(slots[0])[8:72].view(np.float32).reshape(4, 4)
    gc.collect()
    assert arena.take() == NO_SLOT
    del view
    assert arena.take() == slots[0]
    arena.give_back(slots[1])
    arena.give_back(NO_SLOT)
    assert arena.free == 1
    kept = arena.lend(arena.take())
    arena.close()
    kept[:] = 7  # the memory is there as long as the view
    assert int(kept.sum()) == 7 * len(kept)


def test_batches_lie_in_the_arena_and_are_what_the_rank_would_have_prepared(dataset: str) -> None:
    with a_loader(dataset) as loader:
        for want in wanted(dataset, 20):
            batch = loader.next(SECONDS)
            assert batch.images.tobytes() == want
            assert batch.images.flags.writeable
            del batch
        slots = arena_of(loader).file.slots
        assert slots == 5
        with loader._changed:
            assert loader._changed.wait_for(lambda: loader.ready == 3, SECONDS)
        assert arena_of(loader).free == slots - 3


def test_batches_that_are_kept_are_never_overwritten_and_take_no_descriptors(dataset: str) -> None:
    """Report 14 (pytorch#973): there is no slot for most of them, so they come over the pipe."""
    want = wanted(dataset, 25)
    with a_loader(dataset) as loader:
        kept = [loader.next(SECONDS) for _ in range(3)]
        gc.collect()
        before = len(list(DESCRIPTORS.iterdir()))
        kept += [loader.next(SECONDS) for _ in range(22)]
        assert len(list(DESCRIPTORS.iterdir())) <= before
        assert arena_of(loader).free == 0
    assert [batch.images.tobytes() for batch in kept] == want


def test_the_slots_of_killed_workers_are_used_again(dataset: str) -> None:
    want, got = wanted(dataset, 30), list[bytes]()
    with a_loader(dataset) as loader:
        for step in range(30):
            got.append(loader.next(SECONDS).images.tobytes())
            if step % 5 == 0:
                os.kill(loader.pids[step % 2], signal.SIGKILL)
        with loader._changed:
            assert loader._changed.wait_for(lambda: loader.ready == 3 and len(loader._events) == 6, SECONDS)
        assert arena_of(loader).free == 2
    assert got == want


def test_too_little_memory_is_said_at_the_start_with_both_numbers(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 13 (pytorch#5040): not a bus error while it trains."""
    monkeypatch.setattr(loader_module, "memory", lambda: Memory(total_bytes=2**30, available_bytes=2**20))
    with pytest.raises(ConfigError, match=r"need 2 MiB of memory \(8 of 1 MiB each\); 1 MiB are available") as caught:
        a_loader(dataset, prefetch=6)
    assert "train.prefetch_batches" in caught.value.hint


def test_what_the_system_refuses_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="the system says: No space left"):
        Arena(slot_bytes=100, slots=4, available=None)


def test_small_batches_need_no_arena(dataset: str) -> None:
    with a_loader(dataset, batch=2, model=ModelConfig(image_size=8, channels=3)) as loader:
        loader.next(SECONDS)
        assert loader._arena is None


def test_a_loader_can_be_closed_while_its_batches_are_used(dataset: str) -> None:
    with a_loader(dataset) as loader:
        batch = loader.next(SECONDS)
    assert batch.images.tobytes() == wanted(dataset, 1)[0]
