"""Workers that hang, and samples that end every worker that touches them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.errors import DataError
from spec.shards import open_manifest, path_of
from spec.train import ModelConfig
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.data import loader as loader_module
from training.data import stragglers
from training.data.loader import Loader
from training.data.pool import WorkerProcess
from training.data.stragglers import Stragglers

SECONDS = 30.0


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """Thirty pictures, each in a shard of its own."""
    train = [Picture(encoded(picture(number, width=32, height=24)), 32, 24) for number in range(30)]
    return make_tar_dataset(tmp_path / "pictures", train=train, per_shard=1)


def a_loader(dataset: str, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {
        "seed": 3, "learner": "east", "start_position": 0, "batch": 6, "rank": 0, "world_size": 1, "workers": 2,
        "prefetch": 4, "model": ModelConfig(image_size=16, channels=3),
    }  # fmt: skip
    return Loader(dataset, **(arguments | changes))


def wanted(dataset: str, count: int) -> list[list[int]]:
    with a_loader(dataset, workers=0) as loader:
        return [loader.next(SECONDS).ids for _ in range(count)]


def await_that(loader: Loader, condition: Callable[[], bool]) -> None:
    with loader._changed:
        assert loader._changed.wait_for(condition, SECONDS)


def hang(dataset: str, *samples: int) -> None:
    """Whoever reads one of these samples waits for a writer who never comes."""
    for sample in samples:
        path = path_of(dataset).parent / open_manifest(dataset).splits.train[sample].path
        path.unlink()
        os.mkfifo(path)


def kill_whoever_begins(loader: Loader, position: int, *, row: int | None = None) -> None:
    """SIGKILL of the worker that works at a position, if `row` is given once it says that it began that row."""

    def worker() -> WorkerProcess | None:
        for one in loader._workers:
            if one.tickets and one.tickets[0].position == position and (row is None or one.row == row):
                return one
        return None

    await_that(loader, lambda: worker() is not None)
    found = worker()
    assert found is not None
    pid = found.pid
    os.kill(pid, signal.SIGKILL)
    await_that(loader, lambda: pid not in loader._pids())


def test_what_is_late_is_learnt_from_what_tickets_took() -> None:
    some = Stragglers()
    assert some.limit_seconds == float("inf")
    for _ in range(99):
        some.took(0.5)
    assert some.limit_seconds == 2.0
    for _ in range(10):
        some.took(3.0)
    assert some.limit_seconds == 12.0
    for _ in range(600):
        some.took(0.001)
    assert some.limit_seconds == stragglers.LEAST_SECONDS


def test_what_a_worker_that_hangs_holds_is_done_by_another(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(loader_module, "_TICK_SECONDS", 0.05)
    want = wanted(dataset, 80)
    with a_loader(dataset) as loader:
        got = [loader.next(SECONDS).ids for _ in range(40)]
        hung = loader.pids[0]
        os.kill(hung, signal.SIGSTOP)
        got += [loader.next(SECONDS).ids for _ in range(20)]
        assert loader.duplicated > 0
        assert loader.worker_events() == []
        assert hung in loader.pids
        os.kill(hung, signal.SIGCONT)
        await_that(loader, lambda: not any(worker.is_late for worker in loader._workers))
        got += [loader.next(SECONDS).ids for _ in range(20)]
    assert got == want


@pytest.mark.parametrize("rows", [[3], [1, 4]], ids=["one", "two"])
def test_samples_that_end_every_worker_are_found_and_replaced(dataset: str, rows: list[int]) -> None:
    want = wanted(dataset, 6)
    killers = [want[2][row] for row in rows]
    hang(dataset, *killers)
    with a_loader(dataset, workers=1, prefetch=1) as loader:
        got = [loader.next(SECONDS).ids for _ in range(2)]
        for _ in range(2):
            kill_whoever_begins(loader, 12)
        for row in rows:
            kill_whoever_begins(loader, 12, row=row)
        got += [loader.next(SECONDS).ids for _ in range(3)]
        bad = loader.quarantined()
        causes = {event.cause for event in loader.worker_events()}
    assert [(one.position, one.sample, one.reason) for one in bad] == [
        (12 + row, want[2][row], "killed") for row in rows
    ]
    for one in bad:
        want[2][one.position - 12] = one.replacement
    assert got == want[:5]
    assert causes == {"SIGKILL"}


def test_a_position_that_goes_on_to_end_workers_is_an_error(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "MOST_DEATHS", 3)
    (first, *_) = wanted(dataset, 1)
    hang(dataset, first[0])
    with a_loader(dataset, workers=1, prefetch=1) as loader:
        for _ in range(2):
            kill_whoever_begins(loader, 0)
        kill_whoever_begins(loader, 0, row=0)
        with pytest.raises(DataError, match=r"3 loader workers in a row died \(SIGKILL\).*position 0"):
            loader.next(SECONDS)


def test_only_one_worker_is_risked_while_the_others_go_on(dataset: str) -> None:
    want = wanted(dataset, 4)
    hang(dataset, want[0][0])
    with a_loader(dataset, workers=2, prefetch=4) as loader:
        for _ in range(2):
            kill_whoever_begins(loader, 0)
        await_that(loader, lambda: set(loader._done) == {6, 12, 18})
        (alone,) = [worker for worker in loader._workers if worker.is_alone]
        assert [ticket.position for ticket in alone.tickets] == [0]
        kill_whoever_begins(loader, 0, row=0)
        assert loader.next(SECONDS).ids[1:] == want[0][1:]
