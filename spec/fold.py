"""Events become a summary: one pure function, used by the supervisor, the report and the tests alike.

Promises: any subset of a run's events, in any order, folds without an error; events repeated by a restarted writer
count once. What a missing event would have said stays at its default, and shows as an imbalance rather than being made
up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from spec import events as ev
from spec.plan import LearnerPlan, Plan
from spec.summary import (
    Blocked,
    Copies,
    EvaluationSummary,
    LearnerSummary,
    Ledger,
    PreflightSummary,
    RecoverySummary,
    ServiceSummary,
    Summary,
    SyncSummary,
    Waited,
)

_T = TypeVar("_T")
E = TypeVar("E", bound=ev.StepMetrics | ev.AttemptEnded | ev.Restored | ev.LearnerFinished | ev.AttemptStarted)


def fold(events: Iterable[ev.Event], plan: Plan, *, versions: Mapping[str, str] | None = None) -> Summary:
    """The outcome so far."""
    log = sorted(
        events, key=lambda one: one.time
    )  # writers' lines interleave; stable, so equal times keep their order in the file
    last_status = _last([one for one in log if isinstance(one, ev.RunStatus)])
    learners = [_learner(one, log, plan) for one in plan.learners]
    return Summary(
        experiment=plan.experiment,
        run=plan.run,
        status=last_status.status if last_status else "preparing",
        reason=last_status.reason if last_status else "",
        wall_seconds=log[-1].time - log[0].time if log else 0.0,
        versions=dict(versions or {}),
        learners=learners,
        sync=_sync(log, plan) if plan.syncer else None,
        evaluation=_evaluation([one for one in log if isinstance(one, ev.Score)]),
        preflight=_preflight([one for one in log if isinstance(one, ev.Preflight)]),
        services=_services([one for one in log if isinstance(one, (ev.ServiceStats, ev.ServiceAsked))]),
        recoveries=[_recovery(one) for one in log if isinstance(one, ev.Recovery)],
    )


def _last(items: Sequence[_T]) -> _T | None:
    return items[-1] if items else None


def _of(log: Sequence[ev.Event], kind: type[E], learner: str) -> list[E]:
    return [one for one in log if isinstance(one, kind) and one.learner == learner]


def _by_attempt(items: Sequence[E]) -> dict[int, E]:
    """The last event of each attempt."""
    return {one.attempt: one for one in items}


def _learner(learner: LearnerPlan, log: Sequence[ev.Event], plan: Plan) -> LearnerSummary:
    steps = _of(log, ev.StepMetrics, learner.name)
    finished = _last(_of(log, ev.LearnerFinished, learner.name))
    attempts = {one.attempt for one in _of(log, ev.AttemptStarted, learner.name)}
    last = _last(steps)
    done = finished.step if finished else last.step if last else 0
    return LearnerSummary(
        name=learner.name,
        cluster=learner.cluster,
        region=learner.region,
        steps=done,
        samples=_consumed(finished, plan) if finished else last.position if last else 0,
        steps_per_second=_rate(steps),
        final_loss=next((one.loss for one in reversed(steps) if math.isfinite(one.loss)), None),
        restarts=max(0, len(attempts) - 1),
        ledger=min(_ledgers(learner.name, log, finished), key=lambda one: one.merged),
        blocked_seconds=_blocked(steps, finished),
        waited=_waited(steps),
        copies=_copies(steps),
    )


def _consumed(finished: ev.LearnerFinished, plan: Plan) -> int:
    if finished.position is not None:
        return finished.position
    return finished.step * plan.train.batch if plan.train else 0


def _rate(steps: Sequence[ev.StepMetrics]) -> float:
    """Steps per second while training ran: the time between attempts does not count."""
    spans = _spans(steps)
    done = sum(max(0, last.step - first.step) for first, last in spans)
    seconds = sum(last.time - first.time for first, last in spans)
    if done and seconds > 0:
        return done / seconds
    return steps[-1].steps_per_second if steps else 0.0


def _waited(steps: Sequence[ev.StepMetrics]) -> Waited:
    """From the second outer round of each attempt on, if it has one: the first one fills queues and caches."""
    by_attempt: dict[int, list[ev.StepMetrics]] = defaultdict(list)
    for one in steps:
        by_attempt[one.attempt].append(one)
    steady = [[one for one in span if one.round > span[0].round] for span in by_attempt.values()]
    spans = _spans([one for span in steady for one in span] or steps)
    seconds = sum(last.time - first.time for first, last in spans)
    if seconds <= 0:
        return Waited()

    def share(name: str) -> float:
        waited = (last.waited_seconds.get(name, 0.0) - first.waited_seconds.get(name, 0.0) for first, last in spans)
        return max(0.0, sum(waited) / seconds)

    return Waited(data=share("data"), services=share("services"))


def _copies(steps: Sequence[ev.StepMetrics]) -> Copies | None:
    """Counters start anew with each attempt; the last value of each is added up."""
    counts = [one.cache for one in _by_attempt(steps).values() if one.cache]
    if not counts:
        return None
    return Copies(**{name: sum(one.get(name, 0) for one in counts) for name in Copies.model_fields})


def _spans(steps: Sequence[ev.StepMetrics]) -> list[tuple[ev.StepMetrics, ev.StepMetrics]]:
    """The first and the last of each attempt."""
    by_attempt: dict[int, list[ev.StepMetrics]] = defaultdict(list)
    for one in steps:
        by_attempt[one.attempt].append(one)
    return [(span[0], span[-1]) for span in by_attempt.values()]


def _ledgers(learner: str, log: Sequence[ev.Event], finished: ev.LearnerFinished | None) -> list[Ledger]:
    """Of each fragment: all have seen the same samples, but merged them at different times."""
    ended = _by_attempt(_of(log, ev.AttemptEnded, learner))
    restored = _by_attempt(_of(log, ev.Restored, learner))
    latest = _by_attempt(_of(log, ev.StepMetrics, learner))
    run = sum(one.samples_run for one in ended.values())
    for attempt, step in latest.items():
        if attempt not in ended:
            start = restored[attempt].position if attempt in restored else 0
            run += max(0, step.position - start)
    counts = [one for one in log if isinstance(one, ev.SyncLedger)]
    newest = max(reversed(counts), key=lambda one: one.round, default=None)  # a leave is booked in the last round
    fragments = newest.fragments or [newest] if newest else [None]
    pending = _each(finished.pending or [finished.samples_pending] if finished else [0], len(fragments))
    gone = _each(finished.discarded or [finished.samples_discarded] if finished else [0], len(fragments))
    lost = _lost(list(restored.values()), fragments=len(fragments))
    return [
        Ledger(
            run=run,
            merged=count.merged.get(learner, 0) if count else 0,
            pending=pending[fragment],
            discarded=count.discarded.get(learner, 0) if count else gone[fragment],
            lost=lost[fragment],
        )
        for fragment, count in enumerate(fragments)
    ]


def _lost(restored: Sequence[ev.Restored], *, fragments: int) -> list[int]:
    """Samples that restarts threw away, of each fragment: committed by earlier attempts, and in no merge of it.

    A restart goes on at one position, but fragments are merged at different times: one that was ahead of that position
    repeats what is in its merges already, so what it lost is counted from where its unmerged samples began.
    """
    lost, begins, merged = [0] * fragments, [0] * fragments, [0] * fragments
    for one in restored:
        until, now = _each(one.merged_until or [one.position], fragments), _each(one.merged or [0], fragments)
        for fragment in range(fragments):
            if now[fragment] > merged[fragment] or not one.merged:
                begins[fragment] = until[fragment]
            if one.mode == "exact":
                lost[fragment] += one.samples_lost
            else:
                lost[fragment] += one.position + one.samples_lost - begins[fragment]
                begins[fragment] = one.position
        merged = now
    return lost


def _each(counts: list[int], fragments: int) -> list[int]:
    """One number for each fragment, where one may have been said for all."""
    return counts if len(counts) == fragments else counts[:1] * fragments


def _blocked(steps: Sequence[ev.StepMetrics], finished: ev.LearnerFinished | None) -> Blocked:
    """Counters start anew with each attempt; the last value of each is added up."""
    by_attempt = {one.attempt: one.blocked_seconds for one in steps}
    if finished:
        by_attempt[finished.attempt] = finished.blocked_seconds
    total: dict[str, float] = defaultdict(float)
    for counters in by_attempt.values():
        for cause, seconds in counters.items():
            total[cause] += seconds
    return Blocked(**{cause: seconds for cause, seconds in total.items() if cause in Blocked.model_fields})


def _sync(log: Sequence[ev.Event], plan: Plan) -> SyncSummary:
    assert plan.syncer is not None
    merges = [one for one in log if isinstance(one, ev.SyncMerged)]
    newest = max(merges, key=lambda one: one.round, default=None)
    return SyncSummary(
        mode=plan.syncer.config.mode,
        rounds=len({one.round for one in merges}),
        version=newest.round if newest else 0,
        theta_sha256=newest.theta_sha256 if newest else "",
        learners_agree=newest is not None and _agree(log, plan, version=newest.round),
        ledger_imbalance=sum(
            abs(ledger.imbalance)
            for one in plan.learners
            for ledger in _ledgers(one.name, log, _last(_of(log, ev.LearnerFinished, one.name)))
        ),
    )


def _agree(log: Sequence[ev.Event], plan: Plan, *, version: int) -> bool:
    """One fingerprint per version over syncer and learners, of the whole model and of each fragment, and every learner
    holds the last version.
    """
    seen: dict[tuple[int | None, int], set[str]] = defaultdict(set)
    holders: set[str] = set()
    whole = 0 if plan.syncer is None or plan.syncer.config.fragments == 1 else None
    for one in log:
        if isinstance(one, ev.SyncMerged):
            seen[whole, one.round].add(one.theta_sha256)
            if whole is None:
                seen[one.fragment, one.fragment_version].add(one.fragment_sha256)
        elif isinstance(one, (ev.Applied, ev.LearnerFinished)):
            key = one.fragment if isinstance(one, ev.Applied) else whole
            seen[key, one.round].add(one.theta_sha256)
            if (key, one.round) == (whole, version):
                holders.add(one.learner)
    return all(len(prints) == 1 for prints in seen.values()) and holders >= {one.name for one in plan.learners}


def _evaluation(scores: Sequence[ev.Score]) -> EvaluationSummary | None:
    chosen = _last([one for one in scores if one.final]) or _last(scores)
    return EvaluationSummary.model_validate(chosen.model_dump()) if chosen else None


def _preflight(events: Sequence[ev.Preflight]) -> PreflightSummary:
    """The last result of each node; nodes are checked side by side, so the seconds are those of the slowest."""
    newest = {(one.learner, one.node): one for one in events}
    verdicts = [check.verdict for one in newest.values() for check in one.checks]
    return PreflightSummary(
        passed=verdicts.count("PASS"),
        warned=verdicts.count("WARN"),
        failed=verdicts.count("FAIL"),
        unknown=verdicts.count("UNKNOWN"),
        seconds=max((one.seconds for one in newest.values()), default=0.0),
    )


def _services(events: Sequence[ev.ServiceStats | ev.ServiceAsked]) -> dict[str, ServiceSummary]:
    """By service over all learners and replicas, or of a platform's service over all clients: counts added, p50
    weighted by requests, p99 of the slowest."""
    newest = {(one.service, one.learner, *_teller(one)): one for one in events}
    by_service: dict[str, list[ev.ServiceStats | ev.ServiceAsked]] = defaultdict(list)
    for one in newest.values():
        by_service[one.service].append(one)
    merged: dict[str, ServiceSummary] = {}
    for name, parts in sorted(by_service.items()):
        requests = sum(one.requests for one in parts)
        merged[name] = ServiceSummary(
            requests=requests,
            errors=sum(one.errors for one in parts),
            p50_ms=sum(one.p50_ms * one.requests for one in parts) / requests if requests else 0.0,
            p99_ms=max(one.p99_ms for one in parts),
        )
    return merged


def _teller(one: ev.ServiceStats | ev.ServiceAsked) -> tuple[str, int]:
    """Whose counters these are: they start again with each process."""
    if isinstance(one, ev.ServiceAsked):
        return one.client, one.attempt
    return f"{one.replica}", one.incarnation


def _recovery(event: ev.Recovery) -> RecoverySummary:
    return RecoverySummary.model_validate(event.model_dump())
