"""Preflight, recoveries, attempts and the ledger."""

from __future__ import annotations

from gkr.report.markup import Child, Html, el, empty, section, table
from gkr.report.record import RunRecord
from gkr.report.words import MISSING, clock, count, duration, plural
from spec.events import AttemptEnded, AttemptStarted, Check, Preflight, Recovery, Restored
from spec.summary import LearnerSummary

_ORDER = {"FAIL": 0, "UNKNOWN": 1, "WARN": 2, "PASS": 3}
_TONES = {"FAIL": "bad", "UNKNOWN": "warn", "WARN": "warn", "PASS": "good"}


def preflight(record: RunRecord) -> Html:
    """What did not pass in the open, what passed one click away."""
    checks = [(one, check) for one in record.of(Preflight) for check in one.checks]
    if not checks:
        return section("Preflight", empty("No node was checked."), anchor="preflight")
    checks.sort(key=lambda pair: (_ORDER[pair[1].verdict], pair[1].id))
    loud = [pair for pair in checks if pair[1].verdict != "PASS"]
    quiet = [pair for pair in checks if pair[1].verdict == "PASS"]
    nodes = {(one.learner, one.node): one.seconds for one in record.of(Preflight)}
    counts = ", ".join(f"{sum(check.verdict == word for _, check in checks)} {word}" for word in reversed(_ORDER))
    lead = (
        f"{plural(len(nodes), 'node')} checked, at most {duration(max(nodes.values()))} each: {counts}. "
        "UNKNOWN is never PASS."
    )
    passed = (
        el("details", el("summary", f"{plural(len(quiet), 'check')} passed"), _checks(quiet), open=not loud)
        if quiet
        else None
    )
    return section("Preflight", _checks(loud) if loud else None, passed, anchor="preflight", lead=lead)


def _checks(pairs: list[tuple[Preflight, Check]]) -> Html:
    heads = ("verdict", "check", "node", "value", "threshold", "evidence", "took")
    rows: list[list[Child]] = [
        [
            el("span", check.verdict, class_=f"pill {_TONES[check.verdict]}"),
            _check_name(check),
            f"{event.learner} / {event.node}",
            check.value,
            check.threshold,
            check.evidence or MISSING,
            duration(check.seconds),
        ]
        for event, check in pairs
    ]
    return table(heads, rows, numeric=(6,), class_="checks")


def _check_name(check: Check) -> list[Child]:
    """The check's words, with its id small beside them."""
    return [check.name, " ", el("small", check.id)]


def recoveries(record: RunRecord) -> Html:
    """What died, how soon that was noticed, and when training went on."""
    events = record.of(Recovery)
    attempts = _attempts(record)
    if not events:
        return section("Recoveries", empty("Nothing died in this run."), attempts, anchor="recoveries")
    heads = ("at", "learner", "what died", "cause", "action", "noticed after", "first step after", "lost steps")
    rows = [
        [
            clock(one.time - record.start),
            one.learner,
            one.what,
            one.cause,
            one.action,
            duration(one.detected_seconds),
            duration(one.first_step_seconds) if one.first_step_seconds is not None else "never stopped",
            count(one.lost_steps),
        ]
        for one in events
    ]
    return section("Recoveries", table(heads, rows, numeric=(5, 6, 7)), attempts, anchor="recoveries")


def _attempts(record: RunRecord) -> Html | None:
    started = record.of(AttemptStarted)
    if not started:
        return None
    ended = {(one.learner, one.attempt): one for one in record.of(AttemptEnded)}
    restored = {(one.learner, one.attempt): one for one in record.of(Restored)}
    rows: list[list[Child]] = []
    for one in started:
        key = (one.learner, one.attempt)
        end, state = ended.get(key), restored.get(key)
        took_up = f"{state.mode}, step {count(state.step)}" if state else MISSING
        skipped = el("small", "; ".join(state.skipped)) if state and state.skipped else None
        lost = count(state.samples_lost) if state else MISSING
        run, cause = (count(end.samples_run), end.cause) if end else (MISSING, "not ended")
        when = clock(one.time - record.start)
        rows.append(
            [one.learner, one.attempt, one.epoch, when, one.world_size, [took_up, " ", skipped], lost, run, cause]
        )
    heads = ("learner", "attempt", "epoch", "started at", "ranks", "took up", "samples lost", "samples run", "ended")
    return el(
        "details",
        el("summary", plural(len(started), "attempt")),
        table(heads, rows, numeric=(1, 2, 3, 4, 6, 7)),
        open=len(started) > len(record.learners),
    )


def ledger(record: RunRecord) -> Html:
    """Where every sample of every learner went."""
    learners = record.summary.learners if record.summary else []
    if not learners:
        return section("Ledger", empty("No sample was counted."), anchor="ledger")
    heads = ("learner", "run", "merged", "pending", "discarded", "lost", "imbalance")
    rows = [_ledger_row(one) for one in learners]
    lead = "Samples. Run = merged + pending + discarded + lost; anything else is an error of ours."
    return section("Ledger", table(heads, rows, numeric=range(1, 7)), anchor="ledger", lead=lead)


def _ledger_row(learner: LearnerSummary) -> list[Child]:
    one = learner.ledger
    off = el("span", count(one.imbalance), class_="good" if one.imbalance == 0 else "bad")
    return [learner.name, *(count(value) for value in (one.run, one.merged, one.pending, one.discarded, one.lost)), off]
