"""Watching as commands do it.

Follow, and at the end say how it went. The exit code is the run's fate, 130 when the person went away.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing

from gkr.backend import backend_of
from gkr.output import result, result_json, say
from gkr.runs import FINAL, Run, RunState
from gkr.watch.follow import follow
from gkr.watch.text import short_duration
from spec.errors import EXIT_INTERRUPTED
from spec.summary import Summary


def attend(run: Run, *, output: str) -> int:
    """Follow the run to its end, then print its result."""
    assert sys.stderr is not None, "a command line has a stderr"
    try:
        state = follow(run, stream=sys.stderr)
    except KeyboardInterrupt:
        say(f"\nNo longer watching; run {run.name} goes on. Come back with `gkr watch {run.name}`,")
        say(f"read along with `gkr logs -f {run.name}`, or end it with `gkr cancel {run.name}`.")
        return EXIT_INTERRUPTED
    finish(run, state)
    conclude(run, state, output=output)
    return state.exit_code


def finish(run: Run, state: RunState) -> None:
    """Once a run has ended: summary and report, which nobody else makes of a run on clusters."""
    if state.status not in FINAL:
        return
    with closing(backend_of(run).attach(run)) as attachment:
        attachment.finish()


def conclude(run: Run, state: RunState, *, output: str) -> None:
    """The result of a run that is over.

    Its summary in short, where its report lies, and what to do if it is not well.
    """
    summary = read_summary(run)
    if output == "json":
        fields = {
            "run": run.name,
            "path": f"{run.path}",
            "status": state.status,
            "reason": state.reason,
            "exit_code": state.exit_code,
        }
        result_json({**fields, "summary": json.loads(summary.write_json()) if summary else None})
        return
    took = f" after {short_duration(summary.wall_seconds)}" if summary else ""
    reason = f": {state.reason}" if state.reason else ""
    result(f"run {run.name} {state.status}{took}{reason}")
    for line in summary_lines(summary) if summary else []:
        result(f"  {line}")
    report = run.path / "report.html"
    if report.exists():
        result(f"  report: {report}")
    if state.status == "lost":
        say(f"`gkr resume {run.name}` goes on from its checkpoints; `gkr logs --learner run {run.name}` says more.")
    elif state.status == "failed":
        say(f"`gkr logs {run.name}` shows what its processes wrote.")


def read_summary(run: Run) -> Summary | None:
    """The run's summary, once there is one."""
    try:
        return Summary.read_json((run.path / "summary.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def summary_lines(summary: Summary) -> list[str]:
    """The summary for a person, one fact per line."""
    lines = [
        f"{one.name}: {one.steps} steps, {one.samples} samples, {one.steps_per_second:.3g} steps/s"
        + (f", loss {one.final_loss:.4g}" if one.final_loss is not None else "")
        + (f", {one.restarts} restarts" if one.restarts else "")
        for one in summary.learners
    ]
    if summary.sync is not None and summary.sync.rounds:
        sync = summary.sync
        agree = "learners agree" if sync.learners_agree else "learners DO NOT AGREE"
        balance = "" if sync.ledger_imbalance == 0 else f", LEDGER OFF BY {sync.ledger_imbalance} SAMPLES"
        lines.append(f"sync: {sync.rounds} rounds, {sync.mode}, {agree}{balance}")
    if summary.evaluation is not None:
        score = summary.evaluation
        accuracy = f"accuracy {score.classifier_accuracy:.3f} (real {score.classifier_accuracy_real:.3f})"
        distance = f"Frechet distance {score.frechet_distance:.3g} (real {score.frechet_distance_real:.3g})"
        lines.append(f"generated images: {accuracy}, {distance}, {score.samples} images")
    if summary.recoveries:
        lines.append(f"recoveries: {len(summary.recoveries)}")
    return lines
