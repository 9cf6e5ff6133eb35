"""The outer optimizer: delayed Nesterov (cross-region.md 1.6 and 8.3).

Each merge moves the weights at once by its share of a full round; the momentum moves only when a full round has
accumulated. A barrier merge is a full round by itself (`frac` = 1), which makes this exactly Nesterov; decoupled
merges have smaller shares. States are never changed in place: the former weights are being served while the next ones
are computed. Sums stay in the arrays' dtype (float32 in a run), in the order written here, with nothing fused: the
same bits on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.sync.pieces import Array

FULL_ROUND = 1 - 1e-9


@dataclass(frozen=True, kw_only=True)
class OuterState:
    """Theta, B, A and f of one fragment; all arrays one-dimensional and equally long. A is zero while f is."""

    theta: Array
    momentum: Array
    accumulated: Array
    rounds_accumulated: float = 0.0

    @classmethod
    def start(cls, theta: Array) -> OuterState:
        """Version 0: given weights, no momentum."""
        return cls(theta=theta, momentum=np.zeros_like(theta), accumulated=np.zeros_like(theta))


class Spare:
    """Arrays that nobody reads any more, for the next merge to write to.

    The pages of fresh memory cost the system more time than the whole merge takes. Not thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []

    def give(self, *arrays: Array) -> None:
        """Whoever gives an array must not use it again."""
        self._free.extend(arrays)

    def take(self, like: Array) -> Array:
        """An array of this length and dtype with any content."""
        for index, one in enumerate(self._free):
            if one.shape == like.shape and one.dtype == like.dtype:
                return self._free.pop(index)
        return np.empty_like(like)


class OuterStep:
    """One merge: the former state, the next one, and the arithmetic between them, piece by piece.

    `state` is complete when `move` was called for each trainable element and `move_buffers` for each other one, in any
    order and from any thread.
    """

    def __init__(
        self,
        before: OuterState,
        *,
        learning_rate: float,
        momentum: float,
        frac: float = 1.0,
        spare: Spare | None = None,
    ) -> None:
        if not 0 < frac <= 1:
            raise ValueError(f"frac is the share of a full round and must be in (0, 1], got {frac}")
        self._before, self._frac = before, frac
        self._learning_rate, self._momentum = learning_rate, momentum
        self._rounds = before.rounds_accumulated + frac
        self._full, self._alone = self._rounds >= FULL_ROUND, before.rounds_accumulated == 0
        take = spare.take if spare else np.empty_like
        self.state = OuterState(
            theta=take(before.theta),
            momentum=take(before.momentum) if self._full else before.momentum,
            # Where nothing was accumulated and nothing will be, the zeros stay.
            accumulated=before.accumulated if self._full and self._alone else take(before.accumulated),
            rounds_accumulated=0.0 if self._full else self._rounds,
        )

    def move(self, place: slice, gradient: Array, room: Array) -> None:
        """`gradient`, of these elements, is the mean of (base - learner's weights), so it is subtracted.

        Overwrites both `gradient` and `room`.
        """
        before, after, mu = self._before, self.state, self._momentum
        if not self._full:
            self._scale(gradient)
            np.add(before.accumulated[place], gradient, out=after.accumulated[place])
            np.multiply(gradient, self._learning_rate, out=room)
            np.subtract(before.theta[place], room, out=after.theta[place])
            return
        velocity = np.multiply(before.momentum[place], mu, out=after.momentum[place])
        if self._alone:  # accumulated / rounds is the gradient itself
            np.add(velocity, gradient, out=velocity)
            self._scale(gradient)
        else:
            self._scale(gradient)
            np.add(before.accumulated[place], gradient, out=room)
            np.divide(room, self._rounds, out=room)
            np.add(velocity, room, out=velocity)
            after.accumulated[place] = 0
        np.multiply(velocity, mu, out=room)
        np.add(room, gradient, out=room)
        np.multiply(room, self._learning_rate, out=room)
        np.subtract(before.theta[place], room, out=after.theta[place])

    def move_buffers(self, place: slice, gradient: Array) -> None:
        """For elements that are in no optimizer: learning rate 1, no momentum. Overwrites `gradient`."""
        before, after = self._before, self.state
        self._scale(gradient)
        np.subtract(before.theta[place], gradient, out=after.theta[place])
        if after.momentum is not before.momentum:
            after.momentum[place] = 0
        if after.accumulated is not before.accumulated:
            after.accumulated[place] = 0

    def _scale(self, gradient: Array) -> None:
        if self._frac != 1:
            np.multiply(gradient, self._frac, out=gradient)
