"""What a rank measures about its own loop: losses, rates, and the seconds it stood still by cause."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

WAITS = {"data": "data", "services": "encode"}
"""What a rank waits for between two steps, by the cause that it counts the seconds under."""


class Meter:
    """Sums since the last event, and blocked seconds since the start of the attempt."""

    def __init__(self) -> None:
        self.blocked: defaultdict[str, float] = defaultdict(float)
        self.waited = dict.fromkeys(WAITS, 0.0)
        """Seconds that a rank of the learner waited on average, since the start of the attempt."""
        self._told = [0.0] * len(WAITS)
        self._reset()

    @contextmanager
    def standing(self, cause: str) -> Generator[None]:
        """Count the time of this block as time in which training stood still."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.blocked[cause] += time.monotonic() - started

    def waits(self) -> list[float]:
        """Seconds that this rank has waited since the last call, for each of `WAITS`."""
        before, self._told = self._told, [self.blocked.get(cause, 0.0) for cause in WAITS.values()]
        return [now - then for now, then in zip(self._told, before, strict=True)]

    def all_waited(self, sums: Sequence[float], *, ranks: int) -> None:
        """Add the sums over all ranks of what they got from `waits`."""
        for name, seconds in zip(WAITS, sums, strict=True):
            self.waited[name] += seconds / ranks

    def step(self, *, loss: float, gradient_norm: float, samples: int, flops: int) -> None:
        """Add one committed step; samples and model FLOPs of all ranks."""
        self._losses.append(loss)
        self._norms.append(gradient_norm)
        self._samples += samples
        self._flops += flops

    def flush(self) -> dict[str, float]:
        """Means and rates since the last flush. Rates count working time and waiting alike: they are what a person sees
        on the clock."""
        seconds, steps = max(time.monotonic() - self._since, 1e-9), len(self._losses)
        result = {
            "loss": sum(self._losses) / max(steps, 1),
            "gradient_norm": sum(self._norms) / max(steps, 1),
            "steps_per_second": steps / seconds,
            "samples_per_second": self._samples / seconds,
            "flops_per_second": self._flops / seconds,
        }
        self._reset()
        return result

    def rounded(self) -> dict[str, float]:
        """Blocked seconds by cause, for an event."""
        return {cause: round(seconds, 4) for cause, seconds in self.blocked.items()}

    def _reset(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._samples = self._flops = 0
        self._since = time.monotonic()


def resident_bytes() -> int:
    """Resident memory of this process (Linux; 0 elsewhere)."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
