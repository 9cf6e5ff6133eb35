"""The outer optimizer: delayed Nesterov (cross-region.md 1.6 and 8.3).

Each merge moves the weights at once by its share of a full round; the momentum moves only when a full round has
accumulated. A barrier merge is a full round by itself (`frac` = 1), which makes this exactly Nesterov; decoupled
merges have smaller shares. Arrays are never changed in place: the former weights are being served while the next ones
are computed. Sums stay in the arrays' dtype (float32 in a run).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FULL_ROUND = 1 - 1e-9


@dataclass(frozen=True, kw_only=True)
class OuterState:
    """Theta, B, A and f of one fragment; all arrays one-dimensional and equally long."""

    theta: npt.NDArray[Any]
    momentum: npt.NDArray[Any]
    accumulated: npt.NDArray[Any]
    rounds_accumulated: float = 0.0

    @classmethod
    def start(cls, theta: npt.NDArray[Any]) -> OuterState:
        """Version 0: given weights, no momentum."""
        return cls(theta=theta, momentum=np.zeros_like(theta), accumulated=np.zeros_like(theta))


def outer_step(
    state: OuterState, gradient: npt.NDArray[Any], *, learning_rate: float, momentum: float, frac: float = 1.0
) -> OuterState:
    """One merge: `gradient` is the mean of (base - learner's weights), so it is subtracted."""
    if not 0 < frac <= 1:
        raise ValueError(f"frac is the share of a full round and must be in (0, 1], got {frac}")
    theta = state.theta - (learning_rate * frac) * gradient
    accumulated = state.accumulated + frac * gradient
    rounds = state.rounds_accumulated + frac
    if rounds < FULL_ROUND:
        return OuterState(theta=theta, momentum=state.momentum, accumulated=accumulated, rounds_accumulated=rounds)
    velocity = momentum * state.momentum + accumulated / rounds
    theta -= (learning_rate * momentum) * velocity
    return OuterState(theta=theta, momentum=velocity, accumulated=np.zeros_like(accumulated))
