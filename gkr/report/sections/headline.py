"""What the run was, how it ended, and its numbers at a glance."""

from __future__ import annotations

from gkr.report.charts import swatch
from gkr.report.markup import Child, Html, el, join
from gkr.report.record import RunRecord
from gkr.report.words import MISSING, count, duration, moment, number, percent, plural
from spec.events import Note, SyncMerged
from spec.plan import LearnerPlan
from spec.summary import Summary

_FATES = {
    "succeeded": ("good", "Succeeded"),
    "failed": ("bad", "Failed"),
    "cancelled": ("warn", "Cancelled"),
    "running": ("open", "Still running"),
    "preparing": ("open", "Still preparing"),
    "unknown": ("warn", "Fate unknown"),
}


def headline(record: RunRecord) -> Html:
    """The top of the page."""
    tone, fate = _FATES[record.status]
    begun = moment(record.start) if record.events else None
    return el(
        "header",
        el(
            "p",
            el("span", fate, class_=f"fate {tone}"),
            el("span", record.run, class_="run"),
            el("span", begun),
            class_="overline",
        ),
        el("h1", record.title),
        el("p", _sentence(record), class_="summary"),
        el("p", record.reason, class_=f"reason {tone}") if record.reason and record.status != "succeeded" else None,
        _warning(record),
        _learners(record),
    )


def _sentence(record: RunRecord) -> str:
    parts = [plural(len(record.learners), "learner")] if record.learners else []
    if record.plan:
        parts.append(plural(len({one.region for one in record.plan.learners}), "region"))
        parts.append(plural(sum(one.world_size for one in record.plan.learners), "rank"))
    merged = record.of(SyncMerged)
    if merged:
        parts.append(plural(len({one.round for one in merged}), "outer round"))
    what = ", ".join(parts)
    ended = record.status in ("succeeded", "failed", "cancelled")
    time = f"{duration(record.wall_seconds)}{'' if ended else ' so far'}"
    return f"{what} in {time}." if what else f"{time}."


def _warning(record: RunRecord) -> Html | None:
    if record.status in ("succeeded", "failed", "cancelled"):
        return None
    return el(
        "p",
        "This report was written before the run had ended; the numbers are those of its last event.",
        class_="reason open",
    )


def _learners(record: RunRecord) -> Html | None:
    if not record.plan or not record.plan.learners:
        return None
    return el(
        "ul", (_learner(one, index=record.learners.index(one.name)) for one in record.plan.learners), class_="learners"
    )


def _learner(plan: LearnerPlan, *, index: int) -> Html:
    machines = sorted({one.machine for one in plan.nodes})
    gpus = sum(one.gpus for one in plan.nodes)
    hardware = f"{count(gpus)} x {plan.gpu}" if plan.gpu else "CPU"
    where = f"{plan.cluster}, {plan.region}" if plan.cluster != plan.region else plan.region
    nodes = f"{plural(len(plan.nodes), 'node')} ({', '.join(machines)})"
    text = f"{where}: {nodes}, {plural(plan.world_size, 'rank')}, {hardware}"
    return el("li", swatch(index), el("b", plan.name), " ", el("span", text))


def tiles(record: RunRecord) -> Html:
    """Key numbers; each tile says beside what its number is to be read."""
    summary = record.summary
    shown = (
        [*_quality(summary), *_volume(summary), *_trust(summary, settled=record.status == "succeeded")]
        if summary
        else []
    )
    return el("div", shown, class_="tiles")


def _quality(summary: Summary) -> list[Html]:
    score = summary.evaluation
    if score is None:
        return [
            _tile("Classifier accuracy", MISSING, "no evaluation yet"),
            _tile("Fréchet distance", MISSING, "no evaluation yet"),
        ]
    ratio = score.frechet_distance / score.frechet_distance_real if score.frechet_distance_real > 0 else None
    beside = f"real against real {number(score.frechet_distance_real)}, ratio {number(ratio, digits=2)}"
    found = [
        _tile(
            "Classifier accuracy",
            percent(score.classifier_accuracy),
            f"on real images {percent(score.classifier_accuracy_real)}",
        ),
        _tile("Fréchet distance", number(score.frechet_distance), beside),
    ]
    if score.nearest_train_distance > 0:
        beside = f"held-out real images {number(score.nearest_train_distance_real)}; far smaller would be copying"
        found.append(_tile("Distance to training set", number(score.nearest_train_distance), beside))
    return found


def _volume(summary: Summary) -> list[Html]:
    samples = sum(one.samples for one in summary.learners)
    steps = sum(one.steps for one in summary.learners)
    rounds = (_tile("Outer rounds", count(summary.sync.rounds), f"{summary.sync.mode} mode"),) if summary.sync else ()
    return [*rounds, _tile("Samples", count(samples), f"in {plural(steps, 'inner step')}")]


def _trust(summary: Summary, *, settled: bool) -> list[Html]:
    """Whether the run can be believed; what only a whole run can show is no alarm in one that did not get there."""
    found: list[Html] = []
    if summary.sync:
        agree, off = summary.sync.learners_agree, summary.sync.ledger_imbalance
        beside = f"weights {summary.sync.theta_sha256[:12]}" if summary.sync.theta_sha256 else "no fingerprint"
        found.append(
            _tile(
                "Learners agree", "yes" if agree else "no", beside, tone="good" if agree else "bad" if settled else ""
            )
        )
        beside = (
            "samples unaccounted for" if settled or off == 0 else "samples; not settled before a run has ended well"
        )
        tone = "good" if off == 0 else "bad" if settled else ""
        found.append(_tile("Ledger imbalance", count(off), beside, tone=tone))
    worst = max(
        (one.first_step_seconds for one in summary.recoveries if one.first_step_seconds is not None), default=None
    )
    lost = plural(sum(one.lost_steps for one in summary.recoveries), "step")
    beside = (
        f"slowest {duration(worst)}, {lost} lost"
        if worst is not None
        else f"{lost} lost"
        if summary.recoveries
        else "nothing died"
    )
    found.append(_tile("Recoveries", count(len(summary.recoveries)), beside))
    return found


def _tile(name: str, value: str, beside: str, *, tone: str = "") -> Html:
    return el(
        "div",
        el("span", name, class_="name"),
        el("strong", value, class_=tone or None),
        el("span", beside, class_="beside"),
        class_="tile",
    )


def notes(record: RunRecord) -> Html | None:
    """Warnings and errors the run told its watcher, newest last, and what the report could not read."""
    said = [one for one in record.of(Note) if one.level != "info"]
    shown: list[Child] = [
        el("li", el("span", one.level, class_=f"pill {one.level}"), " ", one.text, " ", el("small", one.source))
        for one in said[-50:]
    ]
    warned = record.plan.warnings if record.plan else []
    shown += [
        el("li", el("span", "warning", class_="pill warning"), " ", one, " ", el("small", "plan")) for one in warned
    ]
    shown += [el("li", el("span", "report", class_="pill"), " ", one) for one in dict.fromkeys(record.problems)]
    if not shown:
        return None
    hidden = f" (the last 50 of {len(said)} are shown)" if len(said) > 50 else ""
    urgent = record.status == "failed" or any(one.level == "error" for one in said)
    body = el("ul", join(*shown), class_="notes")
    return el(
        "section",
        el("details", el("summary", f"Warnings and notes: {len(shown)}{hidden}"), body, open=urgent or None),
        id="notes",
    )
