"""HTML from nested calls, escaped by construction.

Only `Html` values pass as they are; every other text that reaches an element or an attribute is escaped. No other
module of the report writes angle brackets around something that a run said.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

_VOID = frozenset({"br", "hr", "img", "input", "meta"})
_FOREIGN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, lone surrogates, and the marks that could show text in another order than it has."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child: TypeAlias = "Html | str | int | float | Iterable[Child] | None"


def escape(text: object) -> Html:
    """Text for content or a quoted attribute; control characters, which HTML does not know, become U+FFFD."""
    return Html(html.escape(_FOREIGN.sub("\N{REPLACEMENT CHARACTER}", str(text)), quote=True))


def join(*children: Child) -> Html:
    """Children one after another; nothing for None."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, (str, int, float)):
            parts.append(escape(child))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def el(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """One element. A trailing underscore of an attribute name is dropped (`class_`), inner ones become dashes; None and
    False leave it out.
    """
    written: list[str] = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        written.append(f" {label}" if value is True else f' {label}="{escape(value)}"')
    head = f"<{name}{''.join(written)}>"
    return Html(head if name in _VOID else f"{head}{join(*children)}</{name}>")


def section(title: str, *children: Child, anchor: str, lead: Child = None) -> Html:
    """A headed part of the page; `lead` is the sentence under the heading."""
    intro = el("p", lead, class_="lead") if lead is not None else None
    return el("section", el("h2", title), intro, *children, id=anchor)


def table(
    heads: Iterable[str], rows: Iterable[Iterable[Child]], *, numeric: Iterable[int] = (), class_: str = ""
) -> Html:
    """A table whose rows become cards on a phone (unless its class says `narrow`).

    `numeric` names the columns that align right.
    """
    names, right = list(heads), set(numeric)

    def align(column: int) -> str | None:
        return "num" if column in right else None

    head = el("tr", (el("th", name, scope="col", class_=align(i)) for i, name in enumerate(names)))
    body = (
        el("tr", (el("td", el("span", cell), data_label=names[i], class_=align(i)) for i, cell in enumerate(row)))
        for row in rows
    )
    return el("div", el("table", el("thead", head), el("tbody", body), class_=class_ or None), class_="table")


def empty(text: str) -> Html:
    """What stands where there is nothing to show."""
    return el("p", text, class_="empty")
