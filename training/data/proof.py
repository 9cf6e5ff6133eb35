"""Proof that a learner trained on exactly what its plan says: from the events of a run, after the fact.

Every attempt of a learner begins at a position and says, step by step, which samples its committed steps were made of.
What has to hold: inside an attempt nothing is left out; an attempt begins no later than where the one before had come
to, so that what was lost is drawn again and nothing is skipped; the samples are those that the plan has at these
positions, with the replacements that were announced; and the last attempt reaches the position that the learner ended
at. World sizes, workers and deaths do not enter: the sums are over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from spec.events import Event, LearnerFinished, Quarantined, Restored, Trained
from training.data.account import Sum, account
from training.data.plan import Plan, Refs


@dataclass
class Proof:
    """What was found for one learner."""

    learner: str
    position: int = 0
    """Up to here every sample of the plan was trained on."""
    attempts: int = 0
    samples: int = 0
    """Of committed steps, over all attempts."""
    again: int = 0
    """Of them, drawn again after a restart."""
    quarantined: int = 0
    problems: list[str] = field(default_factory=list[str])


def prove(events: Iterable[Event], *, learner: str, plan: Plan, batch: int) -> Proof:
    """Check one learner of a run. `batch`: samples of a step of runs whose end does not name its position."""
    proof = Proof(learner)
    replaced: dict[int, Quarantined] = {}
    place: int | None = None
    for event in events:
        match event:
            case Restored() if event.learner == learner:
                place = event.position
                proof.attempts += 1
                if event.position > proof.position:
                    proof.problems.append(
                        f"attempt {event.attempt} begins at {event.position}: {proof.position} to"
                        f" {event.position - 1} were never trained on"
                    )
            case Quarantined() if event.learner == learner:
                replaced[event.position] = event
            case Trained() if event.learner == learner:
                proof.problems += _check(event, place=place, plan=plan, replaced=replaced)
                place = event.last
                proof.samples += event.samples
                proof.position = max(proof.position, event.last)
            case LearnerFinished() if event.learner == learner:
                ended = event.step * batch if event.position is None else event.position
                if ended != proof.position:
                    proof.problems.append(f"it ended at {ended}, but told of samples up to {proof.position}")
            case _:
                pass
    proof.quarantined = len(replaced)
    proof.again = max(0, proof.samples - proof.position)
    return proof


def _check(event: Trained, *, place: int | None, plan: Plan, replaced: dict[int, Quarantined]) -> list[str]:
    name = f"attempt {event.attempt}, {event.first} to {event.last - 1}"
    if event.first != place:
        return [f"{name}: told without what comes before, which ended at {place}"]
    if event.samples != event.last - event.first:
        return [f"{name}: {event.samples} samples"]
    try:
        expected = sum((account(one) for one in _planned(event, plan=plan, replaced=replaced)), Sum())
    except ValueError as error:
        return [f"{name}: {error}"]
    if expected.text == event.sums:
        return []
    return [f"{name}: other samples than the plan has there (sum {event.sums[:12]}, plan {expected.text[:12]})"]


def _planned(event: Trained, *, plan: Plan, replaced: dict[int, Quarantined]) -> Iterable[Refs]:
    position = event.first
    while position < event.last:
        refs = plan.batch(position).refs
        hit = [one for one in range(position, position + len(refs)) if one in replaced] if replaced else []
        if hit:
            samples: np.ndarray = refs.sample.copy()
            for one in hit:
                samples[one - position] = replaced[one].replacement
            refs = Refs(refs.source, samples, refs.epoch)
        yield refs
        position += len(refs)
