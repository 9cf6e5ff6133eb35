"""One Markdown comment per stack, readable in a terminal as well.

The first line is a marker by which the next run finds the comment and edits it. The order is that of importance, and
the text is cut from the end, never from the top: what could be lost is always there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from infra.review.changes import Change, changes
from infra.review.losses import Loss, Weight
from infra.review.preview import Step
from infra.review.report import Review
from infra.review.secrets import masked

LONGEST = 60_000
"""GitHub refuses comments of more than 65,536 characters."""
_FIELDS_SHOWN = 4
_ROWS_SHOWN = 40
_LINES_SHOWN = 80
_LINES_OPEN = 10
_NAMES_SHOWN = 20
_WHY = {Weight.PROTECTED: "protected", Weight.GPUS: "GPUs", Weight.DATA: "data", Weight.NONE: ""}
_DONE = {"create": "created", "update": "updated", "replace": "replaced", "delete": "deleted", "import": "imported",
         "same": "unchanged"}  # fmt: skip


def marker(stack: str) -> str:
    """The line by which a comment is found again."""
    return f"<!-- gkr review of {stack} -->"


def comment(review: Review) -> str:
    """The whole comment."""
    parts = [
        f"{marker(review.stack)}\n### {_title(review)}",
        *_verdict(review),
        *_first(review),
        *_restarts(review),
        *_ignored(review),
        *_gpus(review),
        *_policy(review),
        *_errors(review),
        *_others(review),
    ]
    return _cut("\n\n".join(part for part in parts if part), longest=LONGEST)


def _title(review: Review) -> str:
    counts = review.counts
    if review.waits:
        return f"{review.stack}: can be previewed once {review.waits} is up"
    if any(not one.label and "preview failed" in one.reason for one in review.blocks):
        return f"{review.stack}: the preview failed"
    words = [f"{counts[kind]} {done}" for kind, done in _DONE.items() if kind in counts and kind != "same"]
    return f"{review.stack}: {', '.join(words) or 'no change'}"


def _verdict(review: Review) -> list[str]:
    if not review.blocks and review.waits:
        return [
            f"**Waits for `{review.waits}`**, which is not up: there is nothing to compare with. A deployment brings it"
            " up first, and reviews this stack before it does so with this one."
        ]
    if not review.blocks:
        allowed = f" Allowed by {', '.join(f'`{one}`' for one in review.labels)}." if review.labels else ""
        return [f"**Nothing blocks this change.**{allowed}"]
    lines = [f"**Blocked** for {len(review.blocks)} reason{'s' if len(review.blocks) > 1 else ''}:", ""]
    for one in review.blocks:
        remedy = f" Once a person has looked: label the change `{one.label}`." if one.label else ""
        lines.append(f"- {_cell(one.reason)}.{remedy}")
    return ["\n".join(lines)]


def _first(review: Review) -> list[str]:
    concerns = review.concerns()
    if not concerns:
        return []
    rows = [
        (_op(one.step), f"{_resource(one.step)}", _WHY[one.weight], _forced_by(one), _cell(one.text))
        for one in concerns[:_ROWS_SHOWN]
    ]
    head = ("change", "resource", "why it matters", "forced by", "what is lost")
    return ["#### Look at these first", _table(head, rows) + _more(len(concerns))]


def _forced_by(loss: Loss) -> str:
    if loss.step.kind == "delete":
        return "no longer declared"
    forced = [one for one in changes(loss.step) if one.forces]
    return _fields(forced) if forced else "the engine does not say; look for a replaced parent or dependency"


def _restarts(review: Review) -> list[str]:
    if not review.restarts:
        return []
    rows = [(_resource(one.step), str(one.gpus or ""), _fields(one.fields)) for one in review.restarts]
    text = "Updated in place, but every node is drained and made anew, as fast as the pool's upgrade settings allow:"
    return [
        "#### Nodes made anew",
        text,
        _table(("pool", "GPUs", "because of"), rows[:_ROWS_SHOWN], right={1}) + _more(len(rows)),
    ]


def _ignored(review: Review) -> list[str]:
    if not review.ignored:
        return []
    rows = [(_resource(step), _fields([change])) for step, change in review.ignored]
    text = "The provider accepts these fields and never applies them to what exists already:"
    return ["#### Without effect", text, _table(("resource", "field"), rows[:_ROWS_SHOWN]) + _more(len(rows))]


def _gpus(review: Review) -> list[str]:
    if not review.gpus:
        return []
    rows = [(place.region, place.gpu, _cell(_capacity(place.capacity)), *_counts(count.before, count.after),
             f"{count.replaced} {'made anew' if count.after else 'end first'}" if count.replaced else "")
            for place, count in review.gpus.items()]  # fmt: skip
    before = sum(one.before for one in review.gpus.values())
    after = sum(one.after for one in review.gpus.values())
    if len(rows) > 1:
        away = sum(one.replaced for one in review.gpus.values())
        rows.append(("all", "", "", *_counts(before, after), f"{away} away for a time" if away else ""))
    head = ("region", "GPU", "capacity", "before", "after", "change", "meanwhile")
    parts = ["#### GPUs", _table(head, rows, right={3, 4, 5})]
    if after < before:
        fewer = f"**{before - after} GPUs fewer**: their nodes end, and what runs on them goes back to a checkpoint."
        parts.append(fewer)
    if not review.preview.complete:
        parts.append("Pools that do not change are not in this preview; run it with `--show-sames` for totals.")
    return parts


def _counts(before: int, after: int) -> tuple[str, str, str]:
    return str(before), str(after), _signed(after - before)


def _capacity(text: str) -> str:
    """A reservation's path without the words that every path has."""
    parts = text.split("/")
    return f"{' / '.join(parts[3::2])} ({parts[1]})" if text.startswith("projects/") and len(parts) > 3 else text


def _policy(review: Review) -> list[str]:
    if not review.findings:
        return []
    names: dict[tuple[str, str, str, str], list[str]] = {}
    for one in review.findings:
        same = (one.severity, one.rule, one.message, one.remedy)
        names.setdefault(same, []).append(f"`{_cell(one.name)}`")
    rows = [
        (severity, rule, _some(found), f"{_cell(masked(message))}. Remedy: {_cell(remedy)}")
        for (severity, rule, message, remedy), found in names.items()
    ]
    table = _table(("", "rule", "resource", "finding"), rows[:_ROWS_SHOWN])
    return ["#### Policy", table + _more(len(rows))]


def _errors(review: Review) -> list[str]:
    if not review.errors:
        return []
    lines = [f"- {_cell(masked(one.message))[:600]}" for one in review.errors[:_ROWS_SHOWN]]
    return ["#### Errors of the preview", "\n".join(lines) + _more(len(review.errors))]


def _others(review: Review) -> list[str]:
    shown = {one.step.urn for one in review.concerns()}
    parts: list[str] = []
    for kind in ("replace", "delete", "update", "create", "import"):
        steps = [one for one in review.preview.steps if one.kind == kind and one.custom and one.urn not in shown]
        if not steps:
            continue
        lines = _by_type(steps)
        more = "more " if shown and kind in ("replace", "delete") else ""
        start = "<details open>" if kind == "update" and len(lines) <= _LINES_OPEN else "<details>"
        body = "\n".join(lines[:_LINES_SHOWN]) + _more(len(lines), limit=_LINES_SHOWN)
        parts.append(f"{start}<summary>{len(steps)} {more}{_DONE[kind]}</summary>\n\n{body}\n\n</details>")
    same = review.counts.get("same", 0)
    if same:
        parts.append(f"{same} unchanged.")
    return parts


def _by_type(steps: Sequence[Step]) -> list[str]:
    """One line for all of a type that change alike: a new region, or a new label, touches many things at once."""
    names: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        names.setdefault((short_type(step.type), _detail(step)), []).append(f"`{_cell(step.name)}`")
    return [
        f"- {f'{len(found)} ' if len(found) > 1 else ''}{_cell(kind)} {_some(sorted(found))}{detail}"
        for (kind, detail), found in sorted(names.items())
    ]


def _some(names: Sequence[str]) -> str:
    left = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {left} more" if left > 0 else "")


def _detail(step: Step) -> str:
    if step.kept:
        return ": forgotten here, stays where it is and is still paid for"
    if step.kind not in ("update", "replace"):
        return ""
    rows = changes(step)
    return f": {_fields(rows)}" if rows else ""


def _fields(rows: Sequence[Change]) -> str:
    text = "; ".join(f"`{_cell(one.path)}` {_cell(one.before)} -> {_cell(one.after)}" for one in rows[:_FIELDS_SHOWN])
    left = len(rows) - _FIELDS_SHOWN
    return f"{text}; {left} more" if left > 0 else text


def _op(step: Step) -> str:
    return f"**{step.kind}**"


def _resource(step: Step) -> str:
    return f"`{_cell(step.name)}` ({_cell(short_type(step.type))})"


def short_type(resource_type: str) -> str:
    """`gcp:lustre/instance:Instance` as `lustre Instance`, `kubernetes:apps/v1:DaemonSet` as `kubernetes DaemonSet`."""
    provider, *module, last = resource_type.split(":")
    return f"{module[0].split('/')[0]} {last}" if provider == "gcp" and module else f"{provider} {last}"


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[int] | set[int] = frozenset()
) -> str:
    lines = [f"| {' | '.join(head)} |"]
    lines.append("|" + "|".join(" ---: " if index in right else " --- " for index in range(len(head))) + "|")
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """One line that cannot break out of its cell, close a code span, start HTML or call a person."""
    line = re.sub(r"\s+", " ", text).strip()
    line = line.replace("\\", "\\\\").replace("|", "\\|").replace("`", "'").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"(?<!\w)@(?=[A-Za-z0-9])", "@\u200b", line)


def _signed(number: int) -> str:
    return f"{number:+d}" if number else "0"


def _more(total: int, *, limit: int = _ROWS_SHOWN) -> str:
    return f"\n\n... and {total - limit} more." if total > limit else ""


def _cut(text: str, *, longest: int) -> str:
    if len(text) <= longest:
        return f"{text}\n"
    kept = text[: longest - 200].rsplit("\n", 1)[0]
    open_details = kept.count("<details") - kept.count("</details>")
    return f"{kept}\n\n{'</details>' * open_details}\n\nCut here: the whole review is in the job's artifact.\n"
