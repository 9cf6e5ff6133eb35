"""The proof of what was trained on finds what was skipped, doubled or exchanged, and lets restarts pass."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from spec.events import Event, LearnerFinished, Quarantined, Restored, Trained
from training.data.account import Sum, account
from training.data.mixture import Mixture, Segment
from training.data.plan import Plan, Source, rank_slice
from training.data.proof import Proof, prove

BATCH = 8


def plan(seed: int = 0) -> Plan:
    sources = [Source("ab" * 32, 100), Source("cd" * 32, 37)]
    return Plan(sources, mixture=Mixture([Segment(0, (2, 1))]), seed=seed, learner="east", batches=[BATCH])


def restored(position: int, attempt: int = 1) -> Event:
    return Restored(
        time=0, source="t", learner="east", attempt=attempt, mode="exact", step=position // BATCH, position=position,
        samples_lost=0,
    )  # fmt: skip


def trained(first: int, last: int, attempt: int = 1, *, world: int = 2, of: Plan | None = None) -> Trained:
    """As `world` ranks would tell it."""
    made, sums = of or plan(), Sum()
    for position in range(first, last, BATCH):
        refs = made.batch(position).refs
        parts = [account(refs[rank_slice(BATCH, rank=rank, world_size=world)]) for rank in range(world)]
        sums = sum(parts, sums)
    values = {"first": first, "last": last, "samples": sums.samples, "sums": sums.text}
    return Trained.model_validate({"time": 0, "source": "t", "learner": "east", "attempt": attempt, **values})


def finished(position: int) -> Event:
    return LearnerFinished(
        time=0, source="t", learner="east", attempt=1, step=position // BATCH, samples_pending=0, samples_discarded=0,
        theta_sha256="", round=1, blocked_seconds={},
    )  # fmt: skip


def proof(*events: Event) -> Proof:
    return prove(events, learner="east", plan=plan(), batch=BATCH)


def test_any_schedule_of_restarts_and_world_sizes_is_as_planned() -> None:
    """Invariant I1: kills at random places, each time another world size; what was lost is drawn again."""
    generator = random.Random(5)
    events: list[Event] = [restored(0)]
    position = told = 0
    for attempt in range(1, 12):
        for _ in range(generator.randrange(1, 5)):
            last = position + BATCH * generator.randrange(1, 6)
            events.append(trained(position, last, attempt, world=generator.choice([1, 2, 4, 8])))
            position = last
        told = max(told, position)
        position = BATCH * generator.randrange(max(0, position // BATCH - 6), position // BATCH + 1)
        events.append(restored(position, attempt + 1))
    events += [trained(position, told + BATCH, 12), finished(told + BATCH)]
    found = proof(*events)
    assert found.problems == []
    assert (found.position, found.attempts) == (told + BATCH, 12)
    assert found.samples == found.position + found.again


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (lambda: [restored(0), trained(0, 16), trained(24, 32)], "told without what comes before, which ended at 16"),
        (lambda: [restored(0), trained(0, 16), restored(24, 2)], "16 to 23 were never trained on"),
        (lambda: [restored(0), trained(0, 16, of=plan(seed=1))], "other samples than the plan"),
        (lambda: [restored(0), trained(0, 16).model_copy(update={"samples": 24})], "24 samples"),
        (lambda: [restored(0), trained(0, 16), finished(24)], "ended at 24, but told of samples up to 16"),
        (lambda: [trained(0, 16)], "ended at None"),
    ],
)
def test_what_does_not_add_up_is_found(events: Callable[[], list[Event]], said: str) -> None:
    assert any(said in problem for problem in proof(*events()).problems), proof(*events()).problems


def test_announced_replacements_are_as_planned_and_silent_ones_are_not() -> None:
    refs = plan().batch(8).refs
    told = trained(8, 16)
    was = account(refs[3:4])
    samples = refs.sample.copy()
    samples[3] = 99 - samples[3]
    now = account(type(refs)(refs.source, samples, refs.epoch)[3:4])
    changed = Sum.parse(told.samples, told.sums) - was + now
    event = told.model_copy(update={"sums": changed.text})
    bad = Quarantined(
        time=0, source="t", learner="east", position=11, dataset=0, sample=int(refs.sample[3]), reason="truncated",
        replacement=int(samples[3]),
    )  # fmt: skip
    start: list[Event] = [restored(0), trained(0, 8)]
    assert proof(*start, bad, event).problems == []
    assert proof(*start, bad, event).quarantined == 1
    assert proof(*start, event).problems != []


def test_other_learners_do_not_count() -> None:
    other = trained(80, 88).model_copy(update={"learner": "west"})
    assert proof(restored(0), other, trained(0, 8), finished(8)).problems == []
