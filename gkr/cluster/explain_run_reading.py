"""From a run's folder to the verdicts of its learners: asks its clusters side by side, or nobody for a local run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from gkr.cluster.asking import ask
from gkr.cluster.connection import Connection
from gkr.cluster.explain_facts import Facts, Verdict
from gkr.cluster.explain_reading import read_facts, side_by_side
from gkr.cluster.places import LearnerPlace, Places, places_file, read_places
from gkr.cluster.why import explain, explain_local, named
from gkr.runs import Run
from gkr.watch.tail import EventTail
from spec.errors import GkrError
from spec.events import Event, RunStatus, SyncMerged, SyncWaiting
from spec.plan import Plan

SYNCER = "syncer"


def explain_run(run: Run, *, learner: str | None = None) -> tuple[dict[str, Verdict], Mapping[str, GkrError]]:
    """Verdicts by learner in the plan's order, and the clusters that did not answer."""
    plan = Plan.read_json((run.path / "plan.json").read_bytes())
    events = EventTail(run.path).read()
    if not places_file(run.path).exists():
        return {name: _local(name, plan, events) for name in _names(plan, learner)}, {}
    places = read_places(run.path)
    wanted = [one for one in places.all() if learner in (None, one.learner or SYNCER)]
    entries = [places.clusters[name] for name in dict.fromkeys(one.cluster for one in wanted)]
    answers = ask(entries, partial(_explain_places, wanted=wanted, places=places, plan=plan, events=events))
    found = {name: verdict for answer in answers.found.values() for name, verdict in answer.items()}
    order = [one.learner or SYNCER for one in wanted]
    return {name: named(found[name], run=run.name) for name in order if name in found}, answers.failed


def _explain_places(
    connection: Connection, *, wanted: list[LearnerPlace], places: Places, plan: Plan, events: list[Event]
) -> dict[str, Verdict]:
    here = [one for one in wanted if one.cluster == connection.name]

    def verdict(place: LearnerPlace) -> Verdict:
        own = events_of(events, place.learner or SYNCER)
        return explain(read_facts(connection, place, run=places.run, plan=plan, happened=own))

    verdicts = side_by_side(*(partial(verdict, place) for place in here))
    return {place.learner or SYNCER: one for place, one in zip(here, verdicts, strict=True)}


def events_of(events: list[Event], learner: str) -> list[Event]:
    """What was written about one learner, and what concerns all."""
    return [
        event
        for event in events
        if isinstance(event, (RunStatus, SyncWaiting, SyncMerged)) or getattr(event, "learner", None) == learner
    ]


def _local(learner: str, plan: Plan, events: list[Event]) -> Verdict:
    del plan
    own = events_of(events, learner)
    return explain_local(
        Facts(learner=learner, cluster="", namespace="", job="", queue="", now=time.time(), happened=own)
    )


def _names(plan: Plan, learner: str | None) -> list[str]:
    return [one.name for one in plan.learners if learner in (None, one.name)]
