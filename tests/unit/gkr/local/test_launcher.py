from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from gkr.local.backend import LocalBackend
from gkr.local.launcher import create_run, resume_run
from gkr.runs import find_run, list_runs, read_state
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


def test_a_folder_in_the_way_of_the_link_is_one_clear_error_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    with pytest.raises(RefusedError, match="cannot write the run's folder"):
        create_run(local_runs.plan(), root=tmp_path / "runs")
    assert list_runs(tmp_path / "runs") == []
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == ["digits", "latest"]


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


def test_ctrl_c_while_the_supervisor_starts_leaves_nothing_alive_and_says_so(tmp_path: Path) -> None:
    """With the real supervisor; the signal comes when its process is there and before it owns the run."""
    root, born = tmp_path / "runs", list[psutil.Process]()

    def interrupt() -> None:
        local_runs.wait_until(lambda: bool(born) or born.extend(_supervisors(root)) is not None, "the supervisor")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            LocalBackend().launch(local_runs.plan(), root=root, say=print)
    finally:
        thread.join(timeout=local_runs.DEADLINE_SECONDS)
    assert not any(one.is_running() for one in born)
    assert _supervisors(root) == []
    (run,) = list_runs(root)
    state = read_state(run.path)
    assert (state.status, state.reason, state.exit_code) == ("cancelled", "interrupted while it was started", 103)


def _supervisors(root: Path) -> list[psutil.Process]:
    mine = psutil.Process().children()
    return [one for one in mine if any(str(root) in word for word in one.cmdline())]
