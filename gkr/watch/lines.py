"""Plain lines for a pipe or a log: what changes the picture, at a rate a person can read.

Steps are summed up at most every `STEP_SECONDS` per learner.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from gkr.watch.text import percent, short_count, short_duration
from gkr.watch.view import LearnerView, View, fold
from spec.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    Note,
    Preflight,
    Prepared,
    Recovery,
    Restored,
    RunStatus,
    Score,
    StepMetrics,
    SyncMerged,
)

STEP_SECONDS = 10.0


class LineWriter:
    """Remembers when each learner last had a line; otherwise a pure translation of events."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._said: dict[str, float] = {}

    def feed(self, event: Event) -> list[str]:
        """Lines for one event, usually none."""
        self.view = fold(self.view, event)
        return [f"{_clock(event.time)} {line}" for line in self._lines(event)]

    def _lines(self, event: Event) -> Iterator[str]:
        match event:
            case StepMetrics():
                if (
                    event.time - self._said.get(event.learner, 0.0) >= STEP_SECONDS
                    and event.learner in self.view.learners
                ):
                    self._said[event.learner] = event.time
                    yield learner_line(self.view.learners[event.learner], view=self.view)
            case SyncMerged():
                yield merged_line(event, view=self.view)
            case _:
                line = _event_line(event)
                if line:
                    yield line


def learner_line(learner: LearnerView, *, view: View) -> str:
    """`east: step 120, loss 0.412, 8.3 steps/s, queue 4, 23% of 51.2k samples, 3m05s left`."""
    loss = f", loss {learner.loss:.4g}" if learner.loss is not None else ""
    done = (
        f", {percent(view.samples, view.target_samples)} of {short_count(view.target_samples)} samples"
        if view.target_samples
        else ""
    )
    left = f", {short_duration(view.eta_seconds)} left" if view.eta_seconds is not None else ""
    speed = f"{learner.steps_per_second:.3g} steps/s, queue {learner.loader_queue}"
    return f"{learner.name}: step {learner.step}{loss}, {speed}{done}{left}"


def merged_line(event: SyncMerged, *, view: View) -> str:
    """`round 3 merged: east, central (12.1 s open), 19.2k of 51.2k samples`."""
    members = ", ".join(member.learner for member in event.members if member.samples) or "nobody"
    final = ", final" if event.final else ""
    total = (
        f"{short_count(event.samples_total)} of {short_count(view.target_samples)} samples"
        if view.target_samples
        else ""
    )
    return f"round {event.round} merged: {members} ({event.open_seconds:.1f} s open), {total}{final}"


def recovery_line(event: Recovery) -> str:
    """`recovered: rank 1 of east (SIGKILL), respawned; first step after 8.1 s, 3 steps lost`."""
    of = "" if event.learner in {"run", event.what} else f" of {event.learner}"
    again = f"; first step after {event.first_step_seconds:.1f} s" if event.first_step_seconds is not None else ""
    lost = f", {event.lost_steps} steps lost" if event.lost_steps else ""
    what = "lost" if event.action == "given up" else "recovered"
    return f"{what}: {event.what}{of} ({event.cause}), {event.action}{again}{lost}"


def score_line(event: Score) -> str:
    """`score after round 8 of 360 images: accuracy 0.97 (real 0.98), Frechet 12.1 (real 4.0)`."""
    final = "final score" if event.final else f"score after round {event.round}"
    accuracy = f"accuracy {event.classifier_accuracy:.3f} (real {event.classifier_accuracy_real:.3f})"
    distance = f"Frechet distance {event.frechet_distance:.3g} (real {event.frechet_distance_real:.3g})"
    return f"{final} of {event.samples} images: {accuracy}, {distance}"


def _event_line(event: Event) -> str:
    match event:
        case RunStatus():
            return f"run {event.status}" + (f": {event.reason}" if event.reason else "")
        case Prepared():
            how = "found" if event.reused else f"made in {event.seconds:.1f} s"
            return f"{event.learner}: dataset {how}, {event.samples} samples"
        case Preflight():
            return _preflight_line(event)
        case AttemptStarted():
            return f"{event.learner}: attempt {event.attempt} with {event.world_size} ranks"
        case AttemptEnded():
            return f"{event.learner}: attempt {event.attempt} ended, {event.cause}"
        case Restored() if event.mode != "fresh":
            return f"{event.learner}: goes on at step {event.step} ({event.mode}), {event.samples_lost} samples lost"
        case Score():
            return score_line(event)
        case Recovery():
            return recovery_line(event)
        case Note():
            return event.text if event.level == "info" else f"{event.level}: {event.text}"
        case _:
            return ""


def _preflight_line(event: Preflight) -> str:
    counts = {
        verdict: sum(check.verdict == verdict for check in event.checks)
        for verdict in ("PASS", "WARN", "FAIL", "UNKNOWN")
    }
    text = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    failed = "; ".join(
        f"{check.name} is {check.value}, needs {check.threshold}" for check in event.checks if check.verdict == "FAIL"
    )
    return f"{event.learner}: preflight of {event.node}: {text}" + (f" ({failed})" if failed else "")


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
