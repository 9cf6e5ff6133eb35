"""Why a learner that does not run yet waits, in the words of `gkr why`, for everybody who watches.

Asked only while something waits, and not at every look: an explanation costs more requests than a state.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace

from gkr.cluster.connection import Connection
from gkr.cluster.places import LearnerPlace, Places
from gkr.cluster.state import JobState
from spec.errors import GkrError
from spec.plan import Plan

ASK_SECONDS = 5.0
_WAITING = frozenset({"queued", "starting"})
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Reasons:
    """Of one run that is watched."""

    def __init__(self, plan: Plan, *, places: Places, connections: Mapping[str, Connection]) -> None:
        self._plan, self._places, self._connections = plan, places, connections
        self._known: dict[str, str] = {}
        self._asked = 0.0

    def improve(self, states: Mapping[str, JobState]) -> dict[str, JobState]:
        """The same states, those that wait with the best reason we know."""
        waiting = {name for name, state in states.items() if state.phase in _WAITING}
        now = time.monotonic()
        if waiting and now - self._asked >= ASK_SECONDS:
            self._asked = now
            for place in self._places.learners:
                if place.learner in waiting:
                    self._ask(place)
        return {
            name: replace(state, reason=self._known.get(name, state.reason)) if name in waiting else state
            for name, state in states.items()
        }

    def _ask(self, place: LearnerPlace) -> None:
        from gkr.cluster.explain_reading import read_facts
        from gkr.cluster.why import explain

        try:
            facts = read_facts(self._connections[place.cluster], place, run=self._places.run, plan=self._plan)
        except GkrError:
            return  # what we had is better than nothing
        text = explain(facts).text
        if without_numbers(text) != without_numbers(self._known.get(place.learner, "")):
            self._known[place.learner] = text


def without_numbers(text: str) -> str:
    """To tell a new reason from the old one with newer numbers, which is no news."""
    return _NUMBER.sub("#", text)
