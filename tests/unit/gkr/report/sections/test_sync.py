"""The part of the report about the sync, in both modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gkr.report.record import read_record
from gkr.report.sections.sync import sync
from spec.summary import Copies
from tests.builders.decoupled_run import write_decoupled_run
from tests.builders.synthetic_run import write_synthetic_run


def test_barrier_shows_who_waited_for_whom(tmp_path: Path) -> None:
    drawn = sync(read_record(write_synthetic_run(tmp_path)))
    for words in ("central arrived last in 16 of 16 rounds", "Wait for the merged weights", "waiting at the barrier"):
        assert words in drawn
    for words in ("From snapshot to answer", "Staleness", "in flight"):
        assert words not in drawn


def test_copies_are_shown_where_a_dataset_is_copied(tmp_path: Path) -> None:
    record = read_record(write_synthetic_run(tmp_path))
    assert "copies of its data" not in sync(record)
    assert record.summary is not None
    copies = Copies(hits=1234, fetched_bytes=5_000_000, range_bytes=900, damaged=2)
    east, *others = record.summary.learners
    learners = [east.model_copy(update={"copies": copies}), *others]
    drawn = sync(replace(record, summary=record.summary.model_copy(update={"learners": learners})))
    for words in ("copies of its data", "1\N{NARROW NO-BREAK SPACE}234", "5.0 MB fetched, 900 B by range, 2 damaged"):
        assert words in drawn, words


def test_decoupled_shows_staleness_and_what_was_in_flight_instead(tmp_path: Path) -> None:
    drawn = sync(read_record(write_decoupled_run(tmp_path)))
    for words in (
        "east took part in", "versions stale", "From snapshot to answer", "Staleness of contributions",
        "contribution in flight, training goes on", "waiting: too far ahead", "with the outer momentum", "fragment 1",
    ):  # fmt: skip
        assert words in drawn, words
    for words in ("Wait for the merged weights", "waiting at the barrier", "lowest pair"):
        assert words not in drawn
