"""A language model's steps do not depend on the world either: real ranks over gloo, as `test_step` does for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.worlds import run_worlds, whole

MODEL = {"kind": "lm", "context": 16, "width": 32, "depth": 2, "heads": 2}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Twelve steps of a batch of 14, which 4 ranks do not divide."""
    folder: Path = tmp_path_factory.mktemp("worlds")
    return run_worlds("steps", folder, worlds=["1", "2", "4"], batch=14, count=12, model=MODEL)


@pytest.mark.parametrize("label", ["2", "4"])
def test_losses_weights_and_average_do_not_depend_on_the_world(worlds: dict[str, Any], label: str) -> None:
    alone, together = np.array(worlds["1-0"]["results"]), np.array(worlds[f"{label}-0"]["results"])
    assert alone[0, 0] > 1.5 * alone[-1, 0], "twelve steps should learn that letters are the only bytes"
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    for key in ("initial", "weights", "ema"):
        ours, theirs = whole(worlds, "1", key), whole(worlds, label, key)
        for name, value in ours.items():
            np.testing.assert_allclose(theirs[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{key} {name}")
