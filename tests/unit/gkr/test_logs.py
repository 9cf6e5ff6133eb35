from __future__ import annotations

from pathlib import Path

import pytest

from gkr.logs import Selection, clean, find_logs, select, tail_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two learners; east's ranks are in attempt 3 while its driver is still in attempt 2."""
    names = [
        "run/1/supervisor-0", "run/1/syncer-0", "run/2/syncer-0",
        "east/1/driver-0", "east/2/driver-0", "east/1/rank-0", "east/2/rank-0", "east/3/rank-0", "east/3/rank-1",
        "east/2/service-encoder-0", "west/1/driver-0", "west/1/rank-0", "west/1/rank-1", "west/1/prepare-0",
    ]  # fmt: skip
    for name in names:
        path = tmp_path / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"I am {name}\n")
    (tmp_path / "logs/west/1/rank-1.log").write_text("Traceback (most recent call last):\nValueError: x\n")
    (tmp_path / "logs/west/1/core.dump").write_text("")
    return tmp_path


def _chosen(folder: Path, selection: Selection) -> list[str]:
    return [log.prefix for log in select(find_logs(folder), selection=selection)]


def test_by_default_drivers_first_ranks_and_whoever_left_a_traceback(folder: Path) -> None:
    want = ["east/driver-0#2", "east/rank-0#3", "west/driver-0#1", "west/rank-0#1", "west/rank-1#1"]
    assert _chosen(folder, Selection()) == want


@pytest.mark.parametrize(("selection", "want"), [
    (Selection(learner="run"), ["run/supervisor-0#1", "run/syncer-0#2"]),
    (Selection(rank=1), ["east/rank-1#3", "west/rank-1#1"]),
    (Selection(learner="east", rank=0, attempt=1), ["east/rank-0#1"]),
    (Selection(service="encoder"), ["east/service-encoder-0#2"]),
    (Selection(learner="nobody"), []),
])  # fmt: skip
def test_a_choice_is_met_exactly(folder: Path, selection: Selection, want: list[str]) -> None:
    assert _chosen(folder, selection) == want


def test_everything_is_every_file(folder: Path) -> None:
    assert len(_chosen(folder, Selection(everything=True))) == 14


def test_the_tail_counts_what_it_leaves_out_and_keeps_an_unfinished_last_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "east" / "1" / "driver-0.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"one\ntwo\nthree\nunfini")
    (log,) = find_logs(tmp_path)
    assert tail_lines(log, count=2) == (["three", "unfini"], 2)
    assert tail_lines(log, count=None) == (["one", "two", "three", "unfini"], 0)


def test_a_progress_bar_is_its_last_state_and_bad_bytes_are_no_error() -> None:
    assert clean(b"10%\r50%\r100%\r") == "100%"
    assert clean(b"caf\xe9") == "caf\ufffd"
