"""When a run needs no syncer any more. Pure but for one question to the run's bucket.

The final model is committed, no learner will ask for it again, and whoever evaluates it has fetched it. The first
learner's driver writes `summary.json` into the run's folder when it is done; that is how we know of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spec.errors import GkrError
from spec.plan import Plan
from storage import Limits, open_bucket
from training.sync.messages import Status

SUMMARY = "summary.json"
LONGEST_SECONDS = 600.0
"""After the final model; whoever has not fetched it by then will not."""
_ASK_SECONDS = 2.0
_LIMITS = Limits(connect_seconds=2, request_seconds=5, retry_seconds=0)


@dataclass
class End:
    """Looked at from time to time."""

    learners: frozenset[str]
    evaluated: Callable[[], bool]
    _final_since: float | None = field(default=None, init=False)
    _asked: float = field(default=float("-inf"), init=False)

    @classmethod
    def of(cls, plan: Plan) -> End:
        """The end of this run."""
        samples = any(service.kind == "sample" for service in plan.home.services)

        def evaluated() -> bool:
            try:
                return open_bucket(plan.home.run_uri, limits=_LIMITS).exists(SUMMARY)
            except GkrError:
                return False

        return cls(frozenset(one.name for one in plan.learners), evaluated if samples else lambda: True)

    def reached(self, status: Status, *, now: float) -> str:
        """Why it is reached; empty if it is not."""
        if not status.final:
            return ""
        self._final_since = now if self._final_since is None else self._final_since
        if now - self._final_since > LONGEST_SECONDS:
            return f"the model has been final for {LONGEST_SECONDS:.0f} s"
        # One that is fenced for its silence may be alive behind a link that is cut, and comes for the final model.
        gone = {one.learner for one in status.members if one.state == "left"}
        if self.learners - gone or now - self._asked < _ASK_SECONDS:
            return ""
        self._asked = now
        return "the model is final and all learners have left" if self.evaluated() else ""
