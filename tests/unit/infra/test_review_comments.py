"""Every case's comment, compared with the file that was looked at and accepted.

After a change that is meant: `GKR_UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/unit/infra/test_review_comments.py`,
then read the difference (`git diff tests/golden`) before committing it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.policy.stacks import settings_for
from infra.review import Review, read_preview, review
from infra.review.comment import LONGEST, comment, marker
from tests.builders.golden import check_golden
from tests.builders.previews import BUCKET, bucket, digest, step
from tests.builders.review_cases import CASES

EXPECTED = Path(__file__).resolve().parents[2] / "golden" / "infra" / "review"


def reviewed(name: str) -> Review:
    case = CASES[name]()
    preview = read_preview(case.text)
    return review(preview, settings=settings_for(preview.stack, stacks=["prod.us-east5"]), labels=case.labels)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_comment_is_the_one_that_was_accepted(name: str) -> None:
    path, actual = EXPECTED / f"{name}.md", comment(reviewed(name))
    check_golden(actual, path=path)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in EXPECTED.glob("*.md")} == set(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_change_is_blocked_exactly_when_it_should_be(name: str) -> None:
    found = reviewed(name)
    assert (found.exit_code == 6) is CASES[name]().blocked, found.blocks
    assert found.exit_code in (0, 6)


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_must_not_be_printed_is_not(name: str) -> None:
    text = comment(reviewed(name))
    for secret in CASES[name]().never:
        assert secret not in text


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_row_of_every_table_has_as_many_cells_as_its_head(name: str) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", comment(reviewed(name)), re.MULTILINE)
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_losses_come_before_everything_else_and_the_heaviest_first() -> None:
    text = comment(reviewed("cluster-replaced"))
    order = [text.index(part) for part in ("#### Look at these first", "#### GPUs", "<details")]
    assert order == sorted(order)
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    assert [re.split("`", row)[1] for row in rows[:3]] == ["us-east5", "us-east5-rdma", "ultra-1"]
    assert rows[3].startswith("| **delete** | `scratch`")


def test_a_new_region_is_a_line_per_type_and_an_address_can_be_copied() -> None:
    steps = [step("create", BUCKET, f"bucket-{index:02}", new=bucket(), protect=True) for index in range(30)]
    steps += [step("create", "gcp:projects/iAMMember:IAMMember", "group:research@example.com", new={})]
    text = comment(review(read_preview(digest(steps)), settings=settings_for("prod.us-east5", stacks=[])))
    [buckets] = [line for line in text.splitlines() if line.startswith("- 30 storage Bucket `")]
    assert buckets.endswith("`bucket-19` and 10 more")
    assert "- projects IAMMember `group:research@example.com`" in text.splitlines()


def test_what_a_rule_says_of_many_resources_is_said_once() -> None:
    bare = {**bucket(), "labels": {}}
    steps = [step("create", BUCKET, f"b{index:02}", new=bare, protect=True) for index in range(25)]
    text = comment(review(read_preview(digest(steps)), settings=settings_for("prod.us-east5", stacks=[])))
    [row] = [line for line in text.splitlines() if line.startswith("| refuse | labels |")]
    assert "`b19` and 5 more" in row
    assert "25 policy findings" in text


def test_a_huge_change_is_cut_from_the_end() -> None:
    steps = [step("delete", BUCKET, f"bucket-{index:04}", old=bucket()) for index in range(60)]
    steps += [
        step("update", BUCKET, f"other-{index}-{'x' * 900}", old=bucket(), new={**bucket(), "labels": {"a": "b"}})
        for index in range(200)
    ]
    preview = read_preview(digest(steps))
    text = comment(review(preview, settings=settings_for("prod.us-east5", stacks=[])))
    assert len(text) <= LONGEST
    assert text.startswith(marker("prod.us-east5"))
    assert "... and 20 more." in text
    assert text.count("<details") == text.count("</details>")
    assert "Cut here" in text
