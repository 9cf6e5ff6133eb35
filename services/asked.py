"""What one client asked of a platform's service, whose replicas answer many runs: only clients know it of one run."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any, TypedDict

from services.stats import Times


class Counts(TypedDict):
    """As events and summary name them."""

    requests: int
    errors: int
    p50_ms: float
    p99_ms: float


class Asked:
    """Counters of one client. Thread-safe; times are from asking to the end, of the last 2048 requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors = 0
        self._times = Times()

    def watch(self, future: Future[Any]) -> None:
        """Count this request when it ends; one that its caller took back does not count."""
        began = time.monotonic()
        future.add_done_callback(lambda done: self._ended(done, seconds=time.monotonic() - began))

    def _ended(self, future: Future[Any], *, seconds: float) -> None:
        if future.cancelled():
            return
        failed = future.exception() is not None
        with self._lock:
            self._errors += failed
            self._times.requests += not failed
            self._times.seconds.append(seconds)

    def counts(self) -> Counts:
        """So far."""
        with self._lock:
            p50, p99 = self._times.quantile_ms(50), self._times.quantile_ms(99)
            return Counts(requests=self._times.requests, errors=self._errors, p50_ms=p50, p99_ms=p99)
