"""From a run's folder to the verdicts of its learners: asks its clusters side by side, or nobody for a local run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from gkr.backend import refresh
from gkr.cluster.asking import Answers, ask
from gkr.cluster.connection import Connection
from gkr.cluster.explain_facts import Facts, Level, Verdict
from gkr.cluster.explain_reading import read_facts, side_by_side
from gkr.cluster.places import LearnerPlace, Places, read_places
from gkr.cluster.why import explain, explain_local, named
from gkr.plan_file import read_plan
from gkr.runs import Run, is_on_clusters, read_state
from gkr.watch.tail import EventTail
from spec.errors import GkrError
from spec.events import Event, RunStatus, SyncMerged, SyncWaiting
from spec.plan import Plan

SYNCER = "syncer"


def explain_run(run: Run, *, learner: str | None = None) -> tuple[dict[str, Verdict], Mapping[str, GkrError]]:
    """Verdicts by learner in the plan's order, and the clusters that did not answer."""
    plan = read_plan(run.path)
    if not is_on_clusters(run.path):
        return _local(run, plan, learner=learner), {}
    places = read_places(run.path)
    wanted = [one for one in places.all() if learner in (None, one.learner or SYNCER)]
    entries = [places.clusters[name] for name in dict.fromkeys(one.cluster for one in wanted)]
    question = partial(_read, wanted=wanted, places=places, plan=plan)
    # What the run itself wrote is fetched meanwhile.
    asked: list[Answers[dict[str, Facts]]]
    asked = side_by_side(partial(ask, entries, question), partial(_refresh, run))[:1]
    events = EventTail(run.path).read()
    facts = {name: one for answer in asked[0].found.values() for name, one in answer.items()}
    order = [name for one in wanted if (name := one.learner or SYNCER) in facts]
    verdicts = {name: explain(replace(facts[name], happened=events_of(events, name))) for name in order}
    return {name: named(one, run=run.name) for name, one in verdicts.items()}, asked[0].failed


def events_of(events: Sequence[Event], learner: str) -> list[Event]:
    """What was written about one learner, and what concerns all."""
    everybody = (RunStatus, SyncWaiting, SyncMerged)
    return [one for one in events if isinstance(one, everybody) or getattr(one, "learner", None) == learner]


def _read(connection: Connection, *, wanted: Sequence[LearnerPlace], places: Places, plan: Plan) -> dict[str, Facts]:
    here = [one for one in wanted if one.cluster == connection.name]
    questions = [partial(read_facts, connection, place, run=places.run, plan=plan) for place in here]
    return {place.learner or SYNCER: one for place, one in zip(here, side_by_side(*questions), strict=True)}


def _refresh(run: Run) -> None:
    """A bucket or cluster that does not answer costs the run's own words only; the reading names it."""
    try:
        refresh(run)
    except GkrError:
        return


def _local(run: Run, plan: Plan, *, learner: str | None) -> dict[str, Verdict]:
    events = EventTail(run.path).read()
    now = time.time()
    names = [one.name for one in plan.learners if learner in (None, one.name)]
    state = read_state(run.path)
    if state.status == "lost":
        action = "`gkr resume RUN` goes on from its checkpoints"
        lost = Verdict(Level.RUNNING, "the run is lost", "change", (state.reason,), action=action)
        return {name: named(lost, run=run.name) for name in names}
    blank = Facts(learner="", cluster="", namespace="", job="", queue="", now=now)
    facts = {name: replace(blank, learner=name, happened=events_of(events, name)) for name in names}
    return {name: named(explain_local(one), run=run.name) for name, one in facts.items()}
