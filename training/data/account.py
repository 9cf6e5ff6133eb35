"""What was trained on, as sums that can be checked afterwards without keeping every sample.

Each rank adds the samples of every committed step to a hash that does not depend on their order: two sums modulo 2^64
of mixed (source, epoch, sample). A record says which positions of the learner's order it covers. The sums of all ranks
over the same positions add up to what the plan says for them, or something was lost, doubled or exchanged; an accident
goes unseen with a probability of about 2^-128. Not a defence against somebody who forges samples. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.data.order import mix
from training.data.plan import Refs

_KEYS = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)


@dataclass(frozen=True)
class Sum:
    """How many samples, and their hash."""

    samples: int = 0
    low: int = 0
    high: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.samples + other.samples, (self.low + other.low) % 2**64, (self.high + other.high) % 2**64)

    def __sub__(self, other: Sum) -> Sum:
        return Sum(self.samples - other.samples, (self.low - other.low) % 2**64, (self.high - other.high) % 2**64)

    @property
    def text(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def parse(cls, samples: int, text: str) -> Sum:
        """From an event."""
        if len(text) != 32:
            raise ValueError(f"{text!r} is not a hash of 32 hexadecimal digits")
        return cls(samples, int(text[16:], 16), int(text[:16], 16))


def account(refs: Refs) -> Sum:
    """The sum of some samples."""
    low, high = (_hash(refs, key) for key in _KEYS)
    return Sum(len(refs), low, high)


def _hash(refs: Refs, key: np.uint64) -> int:
    values: NDArray[np.uint64] = refs.source.astype(np.uint64)
    for part in (refs.epoch, refs.sample):
        values = mix(values, key=key) ^ part.astype(np.uint64)
    return int(np.sum(mix(values, key=key), dtype=np.uint64))
