from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gkr.local.launcher import create_run, resume_run
from gkr.runs import find_run, list_runs
from spec.errors import RefusedError
from spec.plan import Plan
from tests.builders import local_runs


def test_a_run_gets_its_folder_its_plan_and_the_link_to_the_latest(tmp_path: Path) -> None:
    for name in ("20261130-120000-aaaaaa", "20261130-120001-bbbbbb"):
        create_run(local_runs.plan(run=name), root=tmp_path / "runs")
    latest = tmp_path / "runs" / "latest"
    assert latest.resolve().name == "20261130-120001-bbbbbb"
    assert Plan.read_json((latest / "plan.json").read_bytes()) == local_runs.plan(run="20261130-120001-bbbbbb")
    assert len(list_runs(tmp_path / "runs")) == 2, "the link is not a third run"


def test_a_file_in_the_way_of_the_runs_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RefusedError, match="cannot write the run's folder") as raised:
        create_run(local_runs.plan(), root=tmp_path / "runs")
    assert "GKR_RUNS" in raised.value.hint


@pytest.mark.parametrize(("options", "want"), [("ro", "Read-only file system"), ("nr_inodes=5", "no space left")])
def test_a_file_system_that_takes_no_run_is_one_clear_error(tmp_path: Path, options: str, want: str) -> None:
    """Real file systems, mounted in a namespace of their own."""
    (tmp_path / "runs").mkdir()
    code = """
import sys
from pathlib import Path
from gkr.local.launcher import create_run
from spec.errors import GkrError
from tests.builders import local_runs
try:
    create_run(local_runs.plan(), root=Path("runs"))
except GkrError as error:
    print(error.exit_code, error)
"""
    inside = f'mount -t tmpfs -o {options} none runs || exit 77; "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, sys.executable, code]
    ended = subprocess.run(
        command, cwd=tmp_path, env=local_runs.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    if not ended.stdout and ended.returncode in {1, 77}:
        pytest.skip(f"cannot mount in a namespace here: {ended.stderr}")
    assert ended.stdout.startswith("6 "), ended.stderr
    assert want in ended.stdout
    assert "hint:" in ended.stdout


def test_only_a_lost_run_is_resumed(tmp_path: Path) -> None:
    run = create_run(local_runs.plan(), root=tmp_path / "runs")
    (run.path / "events.jsonl").write_text(
        '{"time":1,"source":"supervisor","kind":"run_status","status":"succeeded","exit_code":0}\n'
    )
    with pytest.raises(RefusedError, match="is succeeded"):
        resume_run(find_run(run.name, root=tmp_path / "runs"))
