"""A damaged folder costs lines in the report, never the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkr.report.record import read_record
from spec.errors import NotFoundError
from tests.builders.synthetic_run import write_synthetic_run


def test_a_missing_folder_is_the_only_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        read_record(tmp_path / "nowhere")


def test_an_empty_folder_reads_as_an_unknown_run(tmp_path: Path) -> None:
    record = read_record(tmp_path)
    assert (record.status, record.learners, record.summary) == ("unknown", [], None)
    assert record.problems == ["plan.json is missing", "events.jsonl is missing"]


def test_a_torn_and_a_foreign_line_are_counted_and_left_out(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, rounds=1)
    whole = read_record(run)
    with (run / "events.jsonl").open("a") as log:
        log.write('{"kind": "from_the_future", "time": 1, "source": "x"}\n{"kind": "step", "ti')
    record = read_record(run)
    assert len(record.events) == len(whole.events)
    assert record.problems == ["2 lines of events.jsonl could not be read and were left out"]


def test_without_a_summary_the_events_are_folded(tmp_path: Path) -> None:
    run = write_synthetic_run(tmp_path, rounds=2)
    want = read_record(run).summary
    (run / "summary.json").unlink()
    found = read_record(run).summary
    assert want is not None
    assert found is not None
    assert found.learners == want.learners
    assert found.sync == want.sync


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}'])
def test_a_damaged_plan_or_summary_is_named_and_left_out(tmp_path: Path, damage: bytes) -> None:
    run = write_synthetic_run(tmp_path, rounds=1)
    (run / "plan.json").write_bytes(damage)
    (run / "summary.json").write_bytes(damage)
    record = read_record(run)
    assert record.plan is None
    assert [one.split(" ")[0] for one in record.problems] == ["plan.json", "summary.json"]
    assert record.learners == ["east", "central"]


def test_learners_keep_the_order_of_the_plan(tmp_path: Path) -> None:
    assert read_record(write_synthetic_run(tmp_path, names=("zeta", "alpha"), rounds=1)).learners == ["zeta", "alpha"]
