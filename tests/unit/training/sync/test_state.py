"""A fragment's state as a file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

from training.sync.layout import Layout
from training.sync.messages import FragmentRecord, Ledger
from training.sync.outer import OuterState
from training.sync.state import FragmentState, StateNote, map_weights, write_state


def test_a_piece_of_an_earlier_version_costs_no_memory_for_the_whole(tmp_path: Path) -> None:
    """Learners fetch in pieces, several at once: reading all of Theta for each would take many times the model."""
    layout = Layout.from_shapes({"w": [1_000_000]})
    theta = np.random.default_rng(3).standard_normal(layout.total).astype(np.float32)
    ledger = Ledger(run="r", contract="c", fragments=[FragmentRecord(version=3)])
    note = StateNote(ledger=ledger, epoch=1, rounds_accumulated=0.0, shapes=layout.shapes(), event="")
    state = FragmentState(outer=OuterState.start(theta), average=theta * 2)
    written = write_state(state, note=note, folder=tmp_path)
    tracemalloc.start()
    try:
        found = map_weights(written.path)
        piece = found[5000:6000].tobytes()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < theta.nbytes / 10
    assert piece == theta[5000:6000].tobytes()
    written.path.unlink()  # as pruning may do at any moment
    assert np.array_equal(found, theta)
