"""The page as a whole: complete, self-contained, safe, small, and there for every run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gkr.report import build
from gkr.report.document import render
from gkr.report.record import read_record
from spec.errors import NotFoundError
from tests.builders.synthetic_run import write_synthetic_run

ANCHORS = [
    "pictures",
    "loss",
    "timeline",
    "throughput",
    "services",
    "preflight",
    "recoveries",
    "ledger",
    "configuration",
    "versions",
]
VOID = {"meta", "img", "input", "br", "path", "use"}
HOSTILE = """"'><script>alert(1)</script><img src=x onerror=alert(1)></style></title>{0}$\\frac{&amp;\x00\u202e"""


class Page(HTMLParser):
    """Tags, ids and text of a page; complains about what does not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a whole synthetic run; drawn once for all tests that read it."""
    path = build(write_synthetic_run(tmp_path_factory.mktemp("runs")))
    assert path.name == "report.html"
    assert [one.name for one in path.parent.iterdir() if one.name.startswith(".")] == []
    return path.read_text(encoding="utf-8")


def test_every_part_is_there_in_order(whole: str) -> None:
    ids = [attributes["id"] for tag, attributes in Page(whole).tags if tag == "section"]
    assert ids == ANCHORS


def test_the_numbers_a_person_looks_for_are_there(whole: str) -> None:
    text = Page(whole).text
    for words in (
        "Succeeded",
        "2 learners, 2 regions, 4 ranks, 16 outer rounds in 1 min",
        "98.6 %",
        "on real images 97.8 %",
        "real against real 1.40, ratio 2.4",
        "Learners agree yes",
        "Ledger imbalance 0",
        "51 200",
        "central arrived last in 16 of 16 rounds",
        "rank 1",
        "SIGKILL",
        "4.6 s",
        "UNKNOWN",
        "/dev/shm is tmpfs",
        "recipes/digits.yaml:21",
        "2.15.0",
        "a thin upright handwritten zero",
    ):
        assert words in text, words


def test_the_page_is_one_file_without_a_way_out(whole: str) -> None:
    page = Page(whole)
    assert len(whole.encode()) < 700_000
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset", "formaction"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("#", "data:image/png;base64,")), (tag, name, value)
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"@import|url\((?!#)|//\w+\.", re.sub(r"data:image/png;base64,[\w+/=]+", "", whole))
    policy = next(
        attributes["content"]
        for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_ids_are_unique_and_references_lead_somewhere(whole: str) -> None:
    page = Page(whole)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {(attributes.get("href") or "")[1:] for _, attributes in page.tags if "href" in attributes}
    targets |= {attributes.get("aria-labelledby") or "" for _, attributes in page.tags} - {""}
    targets |= {attributes.get("for") or "" for _, attributes in page.tags} - {""}
    assert targets <= set(ids)


def test_pictures_have_words_and_drawings_have_names(whole: str) -> None:
    for tag, attributes in Page(whole).tags:
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-labelledby")


def test_the_same_run_draws_the_same_page(tmp_path: Path, whole: str) -> None:
    assert build(write_synthetic_run(tmp_path)).read_text(encoding="utf-8") == whole


def test_a_run_that_is_still_going_says_so(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, rounds=3, finished=False)
    text = Page(build(run).read_text()).text
    assert "Still running" in text
    assert "written before the run had ended" in text
    assert "so far" in text


@pytest.mark.parametrize("kept", [0, 1, 4, 7, 40])
def test_a_run_that_failed_early_shows_its_reason_and_what_there_is(tmp_path: Path, kept: int) -> None:
    run = write_synthetic_run(tmp_path, rounds=2, finished=False)
    lines = (run / "events.jsonl").read_text().splitlines()[:kept]
    end = {
        "kind": "run_status",
        "time": 1_796_000_100.0,
        "source": "supervisor",
        "status": "failed",
        "reason": "driver east: disk full",
    }
    (run / "events.jsonl").write_text("\n".join([*lines, json.dumps(end)]) + "\n")
    page = Page(build(run).read_text())
    assert "Failed" in page.text
    assert "driver east: disk full" in page.text
    assert [
        attributes["id"] for tag, attributes in page.tags if tag == "section" and attributes["id"] != "notes"
    ] == ANCHORS
    assert "could not be drawn" not in page.text


def test_missing_pieces_are_told_and_cost_only_their_part(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, rounds=2)
    (run / "plan.json").unlink()
    (run / "summary.json").write_text("{")
    for path in (run / "samples").iterdir():
        path.write_bytes(b"damaged")
    text = Page(build(run).read_text()).text
    for words in (
        "plan.json is missing",
        "summary.json is not readable",
        "pictures of round 2: samples/round-2.npy is not a readable array",
        "Succeeded",
    ):
        assert words in text, words
    assert "could not be drawn" not in text


def test_an_empty_folder_still_makes_a_page_and_no_folder_is_an_error(tmp_path: Path) -> None:
    assert "Fate unknown" in Page(build(tmp_path).read_text()).text
    with pytest.raises(NotFoundError):
        build(tmp_path / "nowhere")


def test_nothing_that_a_run_says_becomes_markup(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, rounds=2)
    keep = {
        "status",
        "verdict",
        "mode",
        "level",
        "path",
        "real_path",
        "origin",
        "backend",
        "kind",
        "memory",
        "shm",
        "queue_bytes",
    }

    def poison(value: object, *, key: str = "") -> object:
        if isinstance(value, dict) and key in ("train", "config", "timeouts", "retry"):
            return value
        if isinstance(value, dict):
            names = key in ("queued_by_rank", "by_rank", "by_priority", "versions", "services")
            return {f"{name}{HOSTILE}" if names else name: poison(one, key=name) for name, one in value.items()}
        if isinstance(value, list):
            return [poison(one, key="" if isinstance(one, dict) else key) for one in value]
        return f"{value}{HOSTILE}" if isinstance(value, str) and key not in keep else value

    note = {"kind": "note", "time": 1_796_000_001.0, "source": "driver", "level": "error", "text": "x"}
    lines = [json.loads(one) for one in (run / "events.jsonl").read_text().splitlines()] + [note]
    (run / "events.jsonl").write_text("".join(json.dumps(poison(one)) + "\n" for one in lines))
    for name in ("plan.json", "summary.json"):
        (run / name).write_text(json.dumps(poison(json.loads((run / name).read_text()))))
    record = read_record(run)
    assert record.plan is not None
    assert record.summary is not None
    assert len(record.events) == len(lines)
    text = render(record)
    page = Page(text)
    assert record.problems == []
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [attributes for _, attributes in page.tags if "onerror" in attributes]
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>" in page.text
    assert "\x00" not in text
    assert "\u202e" not in text


def test_a_section_that_fails_is_named_and_the_rest_is_drawn(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, rounds=2)
    record = read_record(run)
    broken = [
        one.model_construct(**{**one.__dict__, "checks": None}) if one.kind == "preflight" else one
        for one in record.events
    ]
    text = Page(
        render(type(record)(folder=run, plan=record.plan, events=tuple(broken), summary=record.summary, problems=[]))
    ).text
    assert "section Preflight: TypeError" in text
    assert "could not be drawn" in text
    assert "Where the time went" in text


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, rounds=150)
    assert build(run).stat().st_size < 1_500_000
