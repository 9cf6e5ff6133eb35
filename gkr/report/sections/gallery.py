"""Generated pictures beside real ones over time, and the scores of each evaluated round."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gkr.report.charts import Chart, Line, line_chart
from gkr.report.markup import Html, el, empty, section
from gkr.report.pixels import SIDES, Pixels, PixelsError, data_uri, read_pixels
from gkr.report.record import RunRecord
from gkr.report.words import MISSING, number, percent
from spec.events import Samples, Score

_MOST_FRAMES = 12
_STRIP_ROWS = 10
_MOST_CELLS = 40
_BUDGET_BYTES = 900_000
"""Of pictures in the page; fewer cells are shown when they are large."""
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Frame:
    """The pictures of one evaluated round."""

    round: int
    captions: list[str]
    generated: Pixels
    real: Pixels | None
    score: Score | None
    side: int = SIDES[0]
    """Pixels a side in the page."""


def gallery(record: RunRecord) -> Html:
    """The section; the strip and the frames work without scripts."""
    frames = _fitted(_frames(record))
    lead = (
        "The merged model draws the same captions from the same noise after each evaluated round; held-out "
        "real scans with the same labels stand beside."
    )
    chart = _scores(record)
    if not frames:
        return section("Pictures over time", empty("No pictures were drawn yet."), chart, anchor="pictures")
    return section(
        "Pictures over time",
        el("div", _strip(frames), _viewer(frames), class_="gallery"),
        chart,
        anchor="pictures",
        lead=lead,
    )


def _frames(record: RunRecord) -> list[Frame]:
    events = {one.round: one for one in record.of(Samples)}
    scores = {one.round: one for one in record.of(Score)}
    return [
        frame
        for one in _spread(sorted(events.values(), key=lambda one: one.round))
        if (frame := _frame(record, event=one, score=scores.get(one.round)))
    ]


def _spread(events: Sequence[Samples]) -> list[Samples]:
    """At most _MOST_FRAMES, evenly, always with the first and the last."""
    if len(events) <= _MOST_FRAMES:
        return list(events)
    return [events[round(i * (len(events) - 1) / (_MOST_FRAMES - 1))] for i in range(_MOST_FRAMES)]


def _frame(record: RunRecord, *, event: Samples, score: Score | None) -> Frame | None:
    try:
        generated = read_pixels(event.path, folder=record.folder)
    except PixelsError as error:
        record.problems.append(f"pictures of round {event.round}: {error}")
        return None
    real = None
    try:
        real = read_pixels(event.real_path, folder=record.folder) if event.real_path else None
    except PixelsError as error:
        record.problems.append(f"real pictures of round {event.round}: {error}")
    captions = event.captions[: len(generated)] + [""] * max(0, len(generated) - len(event.captions))
    return Frame(round=event.round, captions=captions, generated=generated, real=real, score=score)


def _fitted(frames: Sequence[Frame]) -> list[Frame]:
    """The frames with the largest side at which the strip takes at most half of the budget."""
    if not frames:
        return []
    pictures = _STRIP_ROWS * (len(frames) + 1)
    costs = ((side, max(len(data_uri(one.generated[0], side=side)) for one in frames)) for side in SIDES)
    side = next((side for side, cost in costs if cost * pictures <= _BUDGET_BYTES // 2), SIDES[-1])
    return [replace(one, side=side) for one in frames]


def _strip(frames: Sequence[Frame]) -> Html:
    """Rows are captions, columns are rounds, the last column is real."""
    rows = _chosen(frames[-1].captions)
    heads = [el("th", one.round, scope="col") for one in frames]
    head = el("tr", el("th", "caption", scope="col"), heads, el("th", "real", scope="col", class_="real"))
    body = [_strip_row(frames, place=place) for place in rows]
    caption = el("caption", "By caption and outer round")
    return el(
        "div", el("table", caption, el("thead", head), el("tbody", body), class_="strip"), class_="scroll", tabindex="0"
    )


def _strip_row(frames: Sequence[Frame], *, place: int) -> Html:
    caption = frames[-1].captions[place]
    cells = [
        el(
            "td",
            _picture(one.generated, place=at, caption=caption, side=one.side)
            if (at := _same(one, caption=caption, place=place)) is not None
            else MISSING,
        )
        for one in frames
    ]
    real, side = frames[-1].real, frames[-1].side
    shown = real is not None and place < len(real)
    beside = (
        _picture(real, place=place, caption=f"real: {caption}", side=side) if real is not None and shown else MISSING
    )
    return el(
        "tr", el("th", el("span", caption or f"picture {place}"), scope="row"), cells, el("td", beside, class_="real")
    )


def _chosen(captions: Sequence[str]) -> list[int]:
    """One picture per number word if captions have them (in order of the numbers), else the first with captions of
    their own.
    """
    first: dict[str, int] = {}
    for place, caption in enumerate(captions):
        word = next((one for one in re.findall(r"[a-z]+", caption.lower()) if one in _NUMBERS), None)
        first.setdefault(word or caption or str(place), place)
    known = [first[word] for word in _NUMBERS if word in first]
    return known[:_STRIP_ROWS] if len(known) > 1 else list(first.values())[:_STRIP_ROWS]


def _same(frame: Frame, *, caption: str, place: int) -> int | None:
    if place < len(frame.captions) and frame.captions[place] == caption:
        return place
    return frame.captions.index(caption) if caption in frame.captions else None


def _viewer(frames: Sequence[Frame]) -> Html:
    """One frame at a time, chosen by radio buttons: no script is needed."""
    largest = max(len(data_uri(one.generated[0], side=one.side)) for one in frames)
    cells = max(4, min(_MOST_CELLS, _BUDGET_BYTES // 2 // (2 * len(frames) * (largest + 200))))
    parts = [el("b", "Round")]
    for i, one in enumerate(frames):
        parts.append(el("input", type="radio", name="frame", id=f"frame-{i}", checked=i == len(frames) - 1))
        parts.append(el("label", one.round, for_=f"frame-{i}"))
    shown = [_viewed(one, cells=cells) for one in frames]
    rules = "".join(f"#frame-{i}:checked~.frames>:nth-child({i + 1}){{display:grid}}" for i in range(len(frames)))
    return el(
        "div",
        el("style", Html(rules)),
        *parts,
        el("div", shown, class_="frames"),
        class_="viewer",
        role="group",
        aria_label="pictures by round",
    )


def _viewed(frame: Frame, *, cells: int) -> Html:
    score = frame.score
    said = (
        f"accuracy {percent(score.classifier_accuracy)}, Fréchet distance {number(score.frechet_distance)}"
        if score
        else "not scored"
    )
    generated = _grid(frame.generated, captions=frame.captions, cells=cells, side=frame.side)
    left = el(
        "figure",
        el("figcaption", el("b", f"Generated after round {frame.round}"), el("span", said, class_="note")),
        generated,
    )
    if frame.real is None:
        return el("div", left)
    truth = (
        f"accuracy {percent(score.classifier_accuracy_real)}, Fréchet distance {number(score.frechet_distance_real)}"
        if score
        else "held out"
    )
    real = _grid(frame.real, captions=frame.captions, cells=cells, side=frame.side, prefix="real: ")
    right = el("figure", el("figcaption", el("b", "Real, same labels"), el("span", truth, class_="note")), real)
    return el("div", left, right)


def _grid(pixels: Pixels, *, captions: Sequence[str], cells: int, side: int, prefix: str = "") -> Html:
    places = range(min(cells, len(pixels)))
    pictures = (
        _picture(pixels, place=i, caption=f"{prefix}{captions[i] if i < len(captions) else ''}", side=side)
        for i in places
    )
    return el("div", pictures, class_="grid")


def _picture(pixels: Pixels, *, place: int, caption: str, side: int) -> Html:
    return el("img", src=data_uri(pixels[place], side=side), alt=caption, title=caption)


def _scores(record: RunRecord) -> Html | None:
    scores = sorted({one.round: one for one in record.of(Score)}.values(), key=lambda one: one.round)
    if len(scores) < 2:
        return None
    rounds = [float(one.round) for one in scores]
    accuracy = [
        Line("generated", rounds, [one.classifier_accuracy for one in scores], "merged", "points"),
        Line("real", rounds, [one.classifier_accuracy_real for one in scores], "merged", "dashed", faint=True),
    ]
    # The distance shrinks with the number of images, so only scores over equally many share a curve.
    count = Counter(one.samples for one in scores).most_common(1)[0][0]
    alike = [one for one in scores if one.samples == count]
    at = [float(one.round) for one in alike]
    distance = [
        Line("generated against real", at, [one.frechet_distance for one in alike], "merged", "points"),
        Line("real against real", at, [one.frechet_distance_real for one in alike], "merged", "dashed", faint=True),
    ]
    note = "" if len(alike) == len(scores) else f"{count} images each; the final score has {scores[-1].samples}"
    charts = (
        line_chart(
            Chart(
                "accuracy",
                "Classifier accuracy",
                "outer round",
                accuracy,
                shares=True,
            )
        ),
        line_chart(Chart("frechet", "Fréchet distance", "outer round", distance, log=True, note=note)),
    )
    return el("div", charts, class_="charts")
