"""Puts the page together and writes it atomically."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from gkr.report.markup import Html, el, empty, join, section
from gkr.report.record import RunRecord, guarded, read_record
from gkr.report.script import SCRIPT
from gkr.report.sections.config import configuration, versions
from gkr.report.sections.gallery import gallery
from gkr.report.sections.headline import headline, notes, tiles
from gkr.report.sections.health import ledger, preflight, recoveries
from gkr.report.sections.service import service
from gkr.report.sections.sync import sync
from gkr.report.sections.training import losses, throughput
from gkr.report.style import STYLE

_SECTIONS: tuple[tuple[str, str, Callable[[RunRecord], Html]], ...] = (
    ("pictures", "Pictures", gallery),
    ("loss", "Loss", losses),
    ("timeline", "Timeline", sync),
    ("throughput", "Throughput", throughput),
    ("services", "Services", service),
    ("preflight", "Preflight", preflight),
    ("recoveries", "Recoveries", recoveries),
    ("ledger", "Ledger", ledger),
    ("configuration", "Configuration", configuration),
    ("versions", "Versions", versions),
)


def build(run_dir: Path) -> Path:
    """Write `report.html` into the run's folder from what lies there, and return its path.

    Raises NotFoundError for a missing folder only.
    """
    target = run_dir / "report.html"
    page = render(read_record(run_dir))
    draft = run_dir / f".report.{os.getpid()}.tmp"
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def render(record: RunRecord) -> str:
    """The whole page. The same record gives the same text."""
    drawn = [_drawn(record, anchor=anchor, title=title, draw=draw) for anchor, title, draw in _SECTIONS]
    top = guarded(lambda: join(headline(record), tiles(record)), what="headline", problems=record.problems)
    contents = el("nav", (el("a", title, href=f"#{anchor}") for anchor, title, _ in _SECTIONS), aria_label="Contents")
    body = el("body", el("main", top, contents, notes(record), *drawn), el("script", Html(SCRIPT)))
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_policy()),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{record.title}: {record.status}"),
        el("style", Html(STYLE)),
    )
    return join(Html("<!DOCTYPE html>\n"), el("html", head, body, lang="en")) + "\n"


def _policy() -> str:
    """Nothing may be loaded from anywhere, and no script may run but ours: a second wall behind the escaping."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri"
        " 'none'; form-action 'none'"
    )


def _drawn(record: RunRecord, *, anchor: str, title: str, draw: Callable[[RunRecord], Html]) -> Html:
    drawn = guarded(lambda: draw(record), what=f"section {title}", problems=record.problems)
    return (
        drawn
        if drawn is not None
        else section(title, empty("This part could not be drawn; the notes above say why."), anchor=anchor)
    )
