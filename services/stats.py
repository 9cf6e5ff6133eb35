"""What a replica tells about itself: by class, by rank, and as a whole."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spec.events import ServiceClassStats, ServiceRankStats

_REMEMBERED = 2048
"""Requests whose times are kept, of each class."""


@dataclass(frozen=True)
class ServerStats:
    """What a replica has done since its start; the times are those of the last requests."""

    requests: int = 0
    """Answered with a reply."""
    errors: int = 0
    """Answered with an error."""
    cancelled: int = 0
    duplicates: int = 0
    """Arrived again and were not computed again."""
    violations: int = 0
    banned: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    queued: int = 0
    queued_by_rank: dict[str, int] = field(default_factory=dict[str, int])
    batches: int = 0
    batch_mean: float = 0.0
    """Items per batch."""
    clients: int = 0
    grant: int = 0
    grant_bytes: int = 0
    queued_bytes: int = 0
    """Of requests without an answer: never more than the grants of those who are connected, together."""
    by_priority: dict[str, ServiceClassStats] = field(default_factory=dict[str, ServiceClassStats])
    """The times are those of the last requests."""
    by_rank: dict[str, ServiceRankStats] = field(default_factory=dict[str, ServiceRankStats])
    """The ranks with most requests without an answer."""
    weights: str = ""
    """Version of the weights that the last answer came from, if the service has any."""
    computing_seconds: float = 0.0
    """Age of the batch that is being computed."""


@dataclass
class Times:
    """Of the requests of one class."""

    requests: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=_REMEMBERED))

    def quantile_ms(self, percent: int) -> float:
        """0 before the first request."""
        found = sorted(self.seconds)
        return 1000 * found[len(found) * percent // 100] if found else 0.0
