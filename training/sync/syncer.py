"""The syncer as one object: desk for the learners, worker for the rounds, threads that keep both going."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from spec.plan import Plan
from training.sync.core import Core
from training.sync.desk import Desk
from training.sync.journal import Journal
from training.sync.refusals import Refusal
from training.sync.store import Store
from training.sync.worker import Worker

_LOG = logging.getLogger(__name__)
_STORE_CHECK_SECONDS = 1.0
_WORK_WAIT_SECONDS = 1.0


class Syncer:
    """Serves one run from one store. Making one takes the store over, and thereby deposes an earlier syncer."""

    def __init__(
        self,
        plan: Plan,
        *,
        store: Store,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: float = 1.0,
    ) -> None:
        self.core = Core(plan, store=store, journal=journal, clock=clock)
        self.desk = Desk(self.core)
        self.worker = Worker(self.core, retry_seconds=retry_seconds)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to work by itself."""
        for name, target in (("worker", self._work), ("ticker", self._tick), ("watcher", self._watch)):
            thread = threading.Thread(target=self._guard, args=(target,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """End all threads; a commit that is being written is finished or abandoned, never torn."""
        self.core.stop()
        until = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _guard(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Refusal:
            _LOG.debug("a thread ended while stopping", exc_info=True)
        except BaseException as error:  # noqa: BLE001  (thread boundary: the process ends with it)
            _LOG.exception("the syncer cannot go on")
            self.core.fail(error)

    def _work(self) -> None:
        while not self.core.stopping.is_set():
            self.worker.work_once(wait_seconds=_WORK_WAIT_SECONDS)

    def _tick(self) -> None:
        config = self.core.settings.config
        period = max(0.02, min(0.5, config.lease / 10, config.round_deadline / 10))
        while not self.core.stopping.wait(period):
            self.worker.tick()

    def _watch(self) -> None:
        """Apart from the ticker: a store that answers slowly must not look as if the syncer had stood still."""
        while not self.core.stopping.wait(_STORE_CHECK_SECONDS):
            self.worker.check_store()
