"""Every effective value of the run with its origin, and the versions it ran with."""

from __future__ import annotations

from collections.abc import Sequence

from gkr.report.markup import Html, el, empty, section, table
from gkr.report.record import RunRecord
from gkr.report.words import MISSING, plural
from spec.plan import Origin


def configuration(record: RunRecord) -> Html:
    """What somebody chose in the open, defaults one click away; a filter where scripts run."""
    origins = record.plan.origins if record.plan else []
    if not origins:
        return section("Configuration", empty("The plan names no values."), anchor="configuration")
    chosen = [one for one in origins if one.origin != "default"]
    defaults = [one for one in origins if one.origin == "default"]
    search = el(
        "input",
        type="search",
        id="filter",
        placeholder="Filter by path, value or origin",
        aria_label="Filter the configuration",
        hidden=True,
    )
    left = (
        el("details", el("summary", plural(len(defaults), "default")), _values(defaults), open=not chosen)
        if defaults
        else None
    )
    lead = (
        f"{plural(len(origins), 'effective value')}, {len(chosen)} of them chosen: by the file, a recipe, a "
        "flag or the cluster's facts."
    )
    return section(
        "Configuration", search, _values(chosen) if chosen else None, left, anchor="configuration", lead=lead
    )


def _values(origins: Sequence[Origin]) -> Html:
    rows = [
        [
            el("code", one.path),
            el("code", one.value),
            el("span", one.origin, class_=f"pill {one.origin}"),
            el("small", one.where) if one.where else MISSING,
        ]
        for one in origins
    ]
    return table(("path", "value", "origin", "where"), rows, class_="values")


def versions(record: RunRecord) -> Html:
    """Of everything the summary names."""
    told = dict(record.summary.versions) if record.summary else {}
    if record.plan and record.plan.image:
        told["image"] = record.plan.image
    if not told:
        return section("Versions", empty("The summary names no versions."), anchor="versions")
    pairs = (el("div", el("dt", name), el("dd", value)) for name, value in told.items())
    return section("Versions", el("dl", pairs, class_="versions"), anchor="versions")
