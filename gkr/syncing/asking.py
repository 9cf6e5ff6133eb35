"""What is known of a run's sync now: asked of the syncer while it serves, else told by the run's events.

Must not fail because the syncer does not answer: then the reason stands beside what the events tell, and how old that
is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from gkr.backend import backend_of, refresh
from gkr.plan_file import read_plan
from gkr.runs import FINAL, OVER, Run, read_state
from gkr.syncing.told import closed, told_status
from gkr.watch.tail import EventTail
from spec.errors import GkrError, NotFoundError
from spec.sync_status import SyncStatus

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class SyncNow:
    """One look."""

    run: str
    run_state: str
    source: Literal["syncer", "events"]
    seen: float
    """Seconds since 1970 at which it was so; 0 if nothing has happened yet."""
    status: SyncStatus
    trouble: str = ""
    """Why the syncer did not answer."""

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.run_state in OVER


def look(run: Run, *, clock: Callable[[], float] = time.time) -> SyncNow:
    """The sync of one run now; NotFoundError if it has none."""
    plan = read_plan(run.path)
    if plan.syncer is None:
        hint = "only runs of our trainer (`train:`) are synchronised"
        raise NotFoundError(f"run {run.name} has no syncer", hint=hint)
    trouble = ""
    state = read_state(run.path).status
    if state not in FINAL:
        try:
            answer = backend_of(run).ask_syncer(run, path="status")
            return SyncNow(run.name, state, "syncer", clock(), SyncStatus.read_json(answer))
        except ValidationError as error:
            trouble = f"the syncer's answer cannot be read: {error.errors()[0]['msg']}"
        except GkrError as error:
            trouble = error.message
        refresh(run)
        state = read_state(run.path).status
    status, seen = told_status(plan, EventTail(run.path).read())
    if state in OVER:
        status = closed(status)
    return SyncNow(run.name, state, "events", seen, status, trouble=trouble if state not in FINAL else "")
