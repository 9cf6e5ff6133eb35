"""`gkr why`: walk down from "was it created" to "what does rank 0 do", and stop at the first level that blocks; pure.

Promises: the same facts give the same verdict; a verdict names what blocks, at most three lines of evidence, who has to
do something, and numbers. Asks no cluster anything: that is `gkr.cluster.explain_reading`.
"""

from __future__ import annotations

from dataclasses import replace

from gkr.cluster.explain_facts import Facts, Verdict
from gkr.cluster.explain_place import placed
from gkr.cluster.explain_queue import checks, created, queued, quota
from gkr.cluster.explain_run import crashed, ended, happening, running
from gkr.cluster.explain_start import started

_MARKS = {"wait": "wait", "change": "change the request", "admin": "tell an administrator", "none": ""}


def explain(facts: Facts) -> Verdict:
    """Of one learner, or of the syncer, in a cluster."""
    if facts.rayjob is None and not facts.pods and ended(facts):
        return happening(facts)  # its objects may be gone; what it wrote is not
    levels = (created, queued, quota, checks, placed, crashed, started) if facts.job else (placed, crashed, started)
    for level in levels:
        verdict = level(facts)
        if verdict is not None:
            return verdict
    return running(facts)


def explain_local(facts: Facts) -> Verdict:
    """Of a learner on this machine, which is placed and started by definition."""
    return happening(facts)


def lines(learner: str, verdict: Verdict, *, run: str) -> list[str]:
    """For a person: verdict, evidence, action."""
    verdict = named(verdict, run=run)
    head = f"{learner}: {verdict.text}" if learner else verdict.text
    body = [f"  {one}" for one in verdict.evidence]
    mark = _MARKS[verdict.remedy]
    said = not mark or verdict.action.startswith(mark)
    action = verdict.action if said else f"{mark}: {verdict.action}".removesuffix(": ")
    return [head, *body, *([f"  -> {action}"] if action else [])]


def named(verdict: Verdict, *, run: str) -> Verdict:
    """Commands in the action with the run's own name, ready to paste."""
    return replace(verdict, action=verdict.action.replace(" RUN", f" {run}"))
