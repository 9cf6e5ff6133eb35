"""The campaign of the sync in small, with every kind of fault once; `make chaos SCENARIO=sync` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.chaos import sync
from tools.chaos.schedule import KINDS, Fault


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("mode", sync.MODES)
def test_every_fault_is_got_over_and_nothing_is_lost(mode: sync.Mode, tmp_path: Path) -> None:
    """Slow: five processes that import torch, and a run that must outlast four faults. Says nothing about speed."""
    times = dict(zip(KINDS, (3.0, 6.0, 8.0, 10.0), strict=True))
    victims = {"kill learner": "elm", "stop learner": "oak", "partition": "ash", "kill syncer": ""}
    faults = [Fault(at=at, kind=kind, learner=victims[kind], lasts=1.0) for kind, at in times.items()]
    (run,) = sync.run_all({tmp_path / "run": faults}, mode=mode, rounds=20)
    outcome, recoveries = run.outcome, [sync.recovery_seconds(one, run.events) for one in run.injections]
    broken = sync.broken_promises(
        outcome, rate=1.0, loss=1.0, rounds=20, planned=len(faults), recoveries=recoveries
    )  # fmt: skip
    assert not broken
    assert outcome.restarts == 1
    assert outcome.loss < 1.2, "something was learned: an untrained model's loss is about 1.3"
