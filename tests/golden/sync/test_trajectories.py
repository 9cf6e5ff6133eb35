"""Theta, B, A and f of a tiny model after every merge, to the last bit, in both modes.

What changes here changes the weights of every run that is resumed with the new code. After a change that is meant:
`GKR_UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/golden/sync`, then read the difference. Inner steps are
element-wise float32 arithmetic, the same on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders.golden import check_golden
from tests.builders.sync_sim import World, simulate
from training.sync.layout import Floats

EXPECTED = Path(__file__).parent / "trajectories"
START = np.array([0.5, -1.25, 2.0, 0.125, -3.0, 0.75, 1.5], np.float32)
UNEVEN = (1.0, 1.0, 2.5)
WORLDS = {
    "barrier": World(inner_steps=4, steps=16, momentum=0.9, step_times=UNEVEN),
    "barrier-fragments-bf16": World(
        inner_steps=4, steps=16, momentum=0.9, step_times=UNEVEN, fragments=2, codec="bf16"
    ),
    "decoupled": World(mode="decoupled", inner_steps=4, steps=16, momentum=0.9, step_times=UNEVEN, latency=1.5),
    "decoupled-grace-int8": World(
        mode="decoupled", inner_steps=4, steps=16, momentum=0.9, step_times=UNEVEN, latency=1.5, grace=2, codec="int8"
    ),
}


class Descent:
    """Plain steps towards a target of the learner's own."""

    def __init__(self, number: int) -> None:
        self._target = np.arange(len(START), dtype=np.float32) * np.float32(0.5) - np.float32(number)

    def step(self, theta: Floats, progress: float) -> Floats:
        return np.subtract(theta, np.float32(0.1) * (theta - self._target), dtype=np.float32)


def _lines(world: World) -> list[dict[str, Any]]:
    outcome = simulate(START, [Descent(number) for number in range(len(UNEVEN))], world)
    return [
        {
            "fragment": one.fragment,
            "version": one.version,
            "learners": list(one.learners),
            "theta": _hex(one.outer.theta),
            "momentum": _hex(one.outer.momentum),
            "accumulated": _hex(one.outer.accumulated),
            "rounds_accumulated": one.outer.rounds_accumulated.hex(),
        }
        for one in outcome.moments
    ]


def _hex(array: Floats) -> list[str]:
    return [float(value).hex() for value in array]


@pytest.mark.parametrize("name", WORLDS)
def test_a_trajectory_keeps_every_bit(name: str) -> None:
    lines = _lines(WORLDS[name])
    assert len(lines) >= 4
    actual = "[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n"
    path = EXPECTED / f"{name}.json"
    check_golden(actual, path=path)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in EXPECTED.glob("*.json")} == set(WORLDS)
