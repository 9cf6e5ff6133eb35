"""A folder here for a run that was launched elsewhere: its plan comes from its ConfigMap, its clusters from ours.

A run whose other learners are in clusters that were not added here is refused: a cancel would leave half of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gkr.cluster.connection import connect
from gkr.cluster.fields import part
from gkr.cluster.launch import places_of
from gkr.cluster.places import write_places
from gkr.cluster.registry import ClusterEntry, read_registry
from gkr.cluster.survey import Found, survey
from gkr.local.files import write_atomically
from gkr.output import say
from gkr.runs import Run, runs_root
from spec.errors import NotFoundError
from spec.plan import Plan


def adopt(reference: str | None) -> Run | None:
    """The run in the clusters that a person means, with a folder from now on; none if there is none."""
    found, failed = survey(read_registry())
    for error in failed.values():
        say(f"warning: {error}")
    chosen = choose(found, reference=reference)
    return _adopt(chosen, found) if chosen is not None else None


def choose(found: list[Found], *, reference: str | None) -> Found | None:
    """By id, a unique start or the last part of it, or an experiment's name (its latest run); nothing: the latest."""
    newest = sorted(found, key=lambda one: one.created, reverse=True)
    if reference is None or reference == "-":
        return newest[0] if newest else None
    exact = [one for one in newest if reference in {one.run, f"{one.experiment}/{one.run}", one.experiment}]
    if exact:
        return exact[0]
    near = [one for one in newest if one.run.startswith(reference) or one.run.endswith(f"-{reference}")]
    if len({one.run for one in near}) > 1:
        names = ", ".join(sorted({one.run for one in near})[:5])
        raise NotFoundError(f'"{reference}" is the start of several runs: {names}', hint="write one more letter")
    return near[0] if near else None


def _adopt(chosen: Found, found: list[Found]) -> Run:
    plan = _read_plan(chosen)
    entries = _entries(plan, [one for one in found if one.run == chosen.run])
    missing = sorted({one.cluster for one in plan.learners if one.cluster not in entries})
    if missing:
        raise NotFoundError(
            f"run {chosen.run} also has learners in {', '.join(missing)}, which cannot be reached from here",
            hint=f"`gkr clusters add {missing[0]}` first",
        )
    folder = (runs_root() / plan.experiment / plan.run).absolute()
    for name in ("logs", "samples", "state"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_places(folder, places_of(plan, entries=entries))
    write_atomically(folder / "plan.json", plan.model_dump_json(indent=1))  # last: it makes the folder a run
    say(f"run {plan.run} of {plan.experiment} was found in {', '.join(sorted(entries))}; its folder is {folder}")
    return Run(plan.experiment, plan.run, folder, (folder / "plan.json").stat().st_mtime)


def _read_plan(chosen: Found) -> Plan:
    job = chosen.jobs[0]["metadata"]
    connection = connect(chosen.entry)
    try:
        files = part(connection.get("ConfigMap", job["name"], namespace=job["namespace"]), "data")
    finally:
        connection.close()
    if "plan.json" not in files:
        raise NotFoundError(
            f"run {chosen.run} has no plan in {chosen.entry.name}",
            hint="it was not launched by gkr, or is half removed",
        )
    return Plan.read_json(files["plan.json"])


def _entries(plan: Plan, found: list[Found]) -> Mapping[str, ClusterEntry]:
    """The plan's name of a cluster -> our entry: by the learners that were seen there, whatever we call the cluster."""
    by_job = {str(job["metadata"]["name"]): one.entry for one in found for job in one.jobs}
    entries: dict[str, ClusterEntry] = {}
    for learner in plan.learners:
        if learner.job in by_job:
            entries.setdefault(learner.cluster, replace(by_job[learner.job], name=learner.cluster))
    return entries
