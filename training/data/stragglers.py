"""Which workers take much longer than is usual, as a slow disk or a stopped process makes them.

What is usual is learnt from what tickets took. Standard library only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from training.data.pool import WorkerProcess

TIMES = 4.0
"""So many times the 99th percentile is late."""
LEAST_SECONDS = 1.0
"""Nothing is late before."""
_LEARNT = 32
_REMEMBERED = 512


class Stragglers:
    """One loader's memory of how long its tickets took."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self.duplicated = 0

    def took(self, seconds: float) -> None:
        """Book one answered ticket."""
        self._took.append(seconds)

    @property
    def limit_seconds(self) -> float:
        """What is late; without end until enough was seen."""
        if len(self._took) < _LEARNT:
            return float("inf")
        return max(LEAST_SECONDS, TIMES * sorted(self._took)[int(0.99 * (len(self._took) - 1))])

    def late(self, workers: Iterable[WorkerProcess]) -> list[WorkerProcess]:
        """Workers that are late with their oldest ticket and were not known to be."""
        now = time.monotonic()
        old = [one for one in workers if one.tickets and not one.is_late and now - one.began > LEAST_SECONDS]
        if not old:
            return []
        limit = self.limit_seconds
        return [one for one in old if now - one.began > limit]
