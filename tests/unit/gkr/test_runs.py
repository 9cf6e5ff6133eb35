from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from gkr.runs import START_SECONDS, find_run, list_runs, process_birth, read_state
from spec.errors import NotFoundError
from tests.builders import local_runs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three runs of one experiment, the last in the list the newest."""
    for index, name in enumerate(("20261130-120000-abc123", "20261130-120500-abd456", "20261201-090000-fff000")):
        folder = local_runs.run_folder(tmp_path, local_runs.plan(run=name))
        os.utime(folder / "plan.json", (1000 + index, 1000 + index))
    (tmp_path / "digits" / "not-a-run").mkdir()
    (tmp_path / "latest").symlink_to("digits/20261201-090000-fff000")
    return tmp_path


@pytest.mark.parametrize(("reference", "want"), [
    (None, "20261201-090000-fff000"),
    ("-", "20261201-090000-fff000"),
    ("digits", "20261201-090000-fff000"),
    ("20261130-120000-abc123", "20261130-120000-abc123"),
    ("20261201", "20261201-090000-fff000"),
    ("abd456", "20261130-120500-abd456"),
    ("digits/20261130-120500-abd456", "20261130-120500-abd456"),
])  # fmt: skip
def test_a_run_is_found_by_any_of_its_names(root: Path, reference: str | None, want: str) -> None:
    assert find_run(reference, root=root).name == want


def test_a_folder_is_a_name_too(root: Path) -> None:
    assert find_run(f"{root}/latest", root=root).name == "20261201-090000-fff000"


def test_an_ambiguous_start_lists_what_it_could_be(root: Path) -> None:
    with pytest.raises(NotFoundError, match="the start of 2 runs: 20261130-120500-abd456, 20261130-120000-abc123"):
        find_run("20261130", root=root)


def test_a_wrong_name_gets_the_near_one(root: Path) -> None:
    with pytest.raises(NotFoundError) as raised:
        find_run("digit", root=root)
    assert 'did you mean "digits"?' in raised.value.hint


def test_newest_first_and_only_runs(root: Path) -> None:
    assert [run.name[-6:] for run in list_runs(root)] == ["fff000", "abd456", "abc123"]


def _write(folder: Path, *lines: str) -> None:
    (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines))


def test_the_last_status_counts_and_torn_or_foreign_lines_do_not(root: Path) -> None:
    folder = root / "digits" / "20261201-090000-fff000"
    _write(
        folder,
        '{"time":1,"source":"supervisor","kind":"run_status","status":"preparing"}',
        '{"time":2,"source":"x","kind":"note","text":"\\"run_status\\" succeeded"}',
        '{"time":3,"source":"supervisor","kind":"run_status","status":"failed","reason":"why","exit_code":5}',
        '{"time":4,"source":"supervisor","kind":"run_status","sta',
    )
    state = read_state(folder)
    assert (state.status, state.reason, state.exit_code, state.started, state.changed) == ("failed", "why", 5, 1, 3)


def test_a_run_is_alive_only_with_the_very_process_that_announced_itself(root: Path) -> None:
    folder = root / "digits" / "20261201-090000-fff000"
    _write(folder, '{"time":1,"source":"supervisor","kind":"run_status","status":"running"}')
    announced = folder / "state" / "supervisor.json"
    announced.write_text(json.dumps({"pid": os.getpid(), "birth": process_birth(os.getpid())}))
    assert read_state(folder).status == "running"
    announced.write_text(json.dumps({"pid": os.getpid(), "birth": "1"}))
    assert read_state(folder).status == "lost", "a reused process id is not the supervisor"


def test_a_run_that_has_said_nothing_yet_is_starting_and_after_a_while_it_never_will(root: Path) -> None:
    folder = root / "digits" / "20261201-090000-fff000"
    os.utime(folder / "plan.json")
    assert read_state(folder).status == "starting"
    long_ago = time.time() - START_SECONDS - 1
    os.utime(folder / "plan.json", (long_ago, long_ago))
    state = read_state(folder)
    assert (state.status, state.reason) == ("lost", "its supervisor never started")


def test_a_lost_run_lived_until_its_last_event(root: Path) -> None:
    folder = root / "digits" / "20261201-090000-fff000"
    _write(folder, '{"kind":"run_status","time":100,"status":"running"}', '{"kind":"step","time":160}')
    os.utime(folder / "events.jsonl", (160, 160))
    state = read_state(folder)
    assert (state.status, state.started, state.changed) == ("lost", 100, 160)
