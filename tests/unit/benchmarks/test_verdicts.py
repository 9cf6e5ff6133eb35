"""Rows that judge a measured number, the page and the table that show them, and the bounds of the quick subset."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks._quick import Bound
from benchmarks._readme import FEW_ROWS, LONGEST, WIDEST, page, table, tables
from benchmarks._verdicts import COLUMNS, aligned, cells, read_verdicts, sentence, show, verdict, write_result


@pytest.mark.parametrize(
    ("bounds", "target", "judged"),
    [
        ({}, "", "reported"),
        ({"at_least": 3.0}, ">= 3 rps", "met"),
        ({"at_least": 3.1}, ">= 3.1 rps", "missed"),
        ({"at_most": 3.0}, "<= 3 rps", "met"),
        ({"at_most": 2.9}, "<= 2.9 rps", "missed"),
        ({"at_least": 1.0, "at_most": 2.0}, ">= 1 rps and <= 2 rps", "missed"),
        ({"ratio": 0.5, "at_least": 0.75}, ">= 0.75 x", "missed"),
        ({"ratio": 0.8, "at_least": 0.75}, ">= 0.75 x", "met"),
        ({"ratio": 0.8}, "", "reported"),
        ({"ratio": math.nan, "at_most": 1.0}, "<= 1 x", "missed"),
    ],
)
def test_a_bound_applies_to_the_ratio_if_there_is_one_else_to_what_was_measured(
    bounds: dict[str, Any], target: str, judged: str
) -> None:
    row = verdict("1 KB", measured=3.0, unit="rps", **bounds)
    assert (row["target"], row["verdict"]) == (target, judged)


def test_a_row_is_a_sentence_and_cells() -> None:
    row = verdict("1 KB", measured=12345.6, unit="rps", against="bare ZeroMQ 20,000 rps", ratio=0.617, at_least=0.5)
    assert sentence(row) == "1 KB: 12,346 rps, 0.617 x bare ZeroMQ 20,000 rps, target >= 0.5 x: met"
    assert cells(row)["measured"] == "12,346 rps"
    assert tuple(cells(row)) == COLUMNS
    assert sentence(verdict("lost", measured=0, unit="")) == "lost: 0: reported"


def test_the_table_of_the_terminal_is_aligned() -> None:
    lines = list(aligned([{"what": "a", "verdict": "met"}, {"what": "longer", "verdict": "missed"}]))
    assert lines == ["what    verdict", "a       met", "longer  missed"]
    assert list(aligned([])) == [""]


def test_the_page_begins_with_all_verdicts(tmp_path: Path) -> None:
    row = verdict("round", measured=2.5, unit="s", at_most=3)
    for name in ("sync_scale", "sync_merge"):
        write_result(tmp_path / f"{name}.json", {"verdicts": [row], "cores": 2, "seconds": [2.0, 2.5, 3.0]})
    (tmp_path / "chaos_sync.json").write_text(json.dumps([{"seed": 0}]))
    assert read_verdicts(tmp_path / "chaos_sync.json") == []
    text = page(sorted(tmp_path.glob("*.json")))

    top, _, rest = text.partition("## chaos_sync")
    assert [line for line in top.splitlines() if line.startswith("| round")] == [
        f"| round | 2.5 s |  |  | <= 3 s | met | {name} |" for name in ("sync_merge", "sync_scale")
    ]
    assert "python -m tools.chaos sync" in rest
    assert "python -m benchmarks.sync_scale" in rest
    assert "verdict" not in rest
    assert "| seconds |" not in rest, "raw numbers stay in the file"


def wide(columns: int, rows: int) -> list[dict[str, Any]]:
    return [{f"c{column}": row for column in range(columns)} for row in range(rows)]


def test_a_wide_table_with_few_rows_is_turned_and_one_too_large_is_left_to_the_file() -> None:
    assert table("t", wide(WIDEST, FEW_ROWS)).splitlines()[2].startswith("| c0 | c1 |")
    turned = table("t", wide(WIDEST + 1, 2)).splitlines()
    assert turned[2] == "| t | 1 | 2 |"
    assert turned[-1] == f"| c{WIDEST} | 0 | 1 |"
    assert (
        table("t", wide(WIDEST + 1, FEW_ROWS + 1)) == f"t: {FEW_ROWS + 1} rows of {WIDEST + 1} values, in the file.\n"
    )
    assert table("t", wide(2, LONGEST + 1)) == f"t: {LONGEST + 1} rows of 2 values, in the file.\n"


def test_like_objects_become_a_table_and_others_single_values() -> None:
    found = {"rates": {"1KB": {"ours": 2, "ray": 1}, "1MB": {"ours": 4, "ray": 1}}, "machine": {"cores": 2}}
    single, rates = tables(found)
    assert "| machine.cores | 2 |" in single
    assert rates.splitlines()[2:] == [
        "| rates | ours | ray |",
        "| --- | --- | --- |",
        "| 1KB | 2 | 1 |",
        "| 1MB | 4 | 1 |",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "True"),
        (3, "3"),
        (3.0, "3"),
        (1234567, "1,234,567"),
        (0.12345, "0.1235"),
        (math.inf, "inf"),
        ("a|b", "a\\|b"),
    ],
)
def test_numbers_have_four_digits(value: object, text: str) -> None:
    assert show(value) == text


def test_a_quick_bound_names_the_row_that_breaks_it() -> None:
    rows = [verdict("1 KB", measured=3.0, unit="rps", ratio=0.5), verdict("lost", measured=2, unit="requests")]
    assert Bound("1 KB", at_least=0.5).broken_by(rows) == ""
    assert "1 KB: 3 rps" in Bound("1 KB", at_least=0.51).broken_by(rows)
    assert "from -inf to 0" in Bound("lost", at_most=0).broken_by(rows)
    assert Bound("1 MB", at_least=0).broken_by(rows) == "1 MB: not measured"
