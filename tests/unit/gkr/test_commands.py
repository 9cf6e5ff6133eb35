"""The commands as a person uses them: real processes, stand-ins for driver and syncer (tests/builders/standins.py)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from gkr.loading import load_plan
from gkr.local.launcher import create_run
from gkr.runs import find_run, supervisor_pid
from tests.builders import local_runs, standins
from tests.builders.synthetic_run import write_synthetic_run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with an experiment file whose runs start stand-ins."""
    standins.install(tmp_path)
    digits = (local_runs.REPOSITORY / "recipes" / "digits.yaml").read_text()
    (tmp_path / "digits.yaml").write_text(digits)
    return tmp_path


def _script(place: Path, behaviours: dict[str, list[str]]) -> dict[str, str]:
    (place / "standin.json").write_text(json.dumps(behaviours))
    return {"GKR_STANDIN_SCRIPT": f"{place / 'standin.json'}"}


def test_launch_follows_to_the_end_and_its_exit_code_is_the_fate(place: Path) -> None:
    more = _script(place, {"syncer": ["serve"], "east": ["finish"], "west": ["killed", "finish"]})
    ended = local_runs.gkr("launch", "digits.yaml", cwd=place, **more)
    assert ended.returncode == 0, ended.stderr
    assert "succeeded" in ended.stdout
    assert "report.html" in ended.stdout
    for line in (
        "run preparing",
        "east: attempt 1 with 2 ranks",
        "east: step 10",
        "warning: the driver of west ended with SIGKILL; it is started again as attempt 2",
        "recovered: driver of west (SIGKILL)",
    ):
        assert line in ended.stderr
    run = find_run(None, root=place / "runs")
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["status"] == "succeeded"
    assert [one["cause"] for one in summary["recoveries"]] == ["SIGKILL"]
    assert (place / "runs" / "latest" / "report.html").exists()

    listed = json.loads(local_runs.gkr("ps", "-o", "json", cwd=place).stdout)
    assert [(one["run"], one["status"], one["exit_code"]) for one in listed] == [(run.name, "succeeded", 0)]
    described = local_runs.gkr("describe", run.name[:12], cwd=place).stdout
    assert "succeeded" in described
    assert "recovered: driver of west" in described
    logs = local_runs.gkr("logs", "digits", cwd=place).stdout
    assert "east/driver-0#1 | driver east attempt 1: finish" in logs
    assert "west/driver-0#2 | driver west attempt 2: finish" in logs
    assert "west/driver-0#1" not in logs
    cancelled = local_runs.gkr("cancel", run.name, cwd=place)
    assert (cancelled.returncode, cancelled.stdout) == (0, f"run {run.name} had succeeded already\n")


def test_a_failed_run_gives_its_reason_on_stdout_and_its_code(place: Path) -> None:
    more = _script(place, {"syncer": ["serve"], "east": ["exit:100"], "west": ["wait"]})
    ended = local_runs.gkr("launch", "digits.yaml", "-o", "json", cwd=place, **more)
    assert ended.returncode == 100
    result = json.loads(ended.stdout)
    assert result["status"] == "failed"
    assert "ValueError: shape (3,) is not (4,)" in result["reason"]
    assert result["summary"]["status"] == "failed"


def test_ctrl_c_only_detaches_and_the_run_can_be_watched_followed_and_cancelled(place: Path) -> None:
    more = _script(place, {"syncer": ["serve"], "east": ["wait"], "west": ["wait"]})
    launched = local_runs.start("gkr", "launch", "digits.yaml", cwd=place, **more)
    follower = None
    try:
        assert launched.stderr is not None
        seen = ""
        for line in launched.stderr:
            seen += line
            if "run running" in line:
                break
        launched.send_signal(signal.SIGINT)
        _, rest = launched.communicate(timeout=local_runs.DEADLINE_SECONDS)
        run = find_run(None, root=place / "runs")
        assert launched.returncode == 130, seen + rest
        assert f"gkr watch {run.name}" in rest
        assert f"gkr logs -f {run.name}" in rest
        pid = supervisor_pid(run.path)
        assert pid is not None, "the run goes on"

        follower = local_runs.start("gkr", "logs", "-f", "--learner", "east", cwd=place)
        assert follower.stdout is not None
        assert "driver east attempt 1: wait" in follower.stdout.readline()
        ended = local_runs.gkr("cancel", "-", cwd=place)
        assert (ended.returncode, ended.stdout) == (0, f"run {run.name} cancelled\n")
        assert not local_runs.is_alive(pid)
        _, said = follower.communicate(timeout=local_runs.DEADLINE_SECONDS)
        assert (follower.returncode, "cancelled" in said) == (103, True)
        assert local_runs.gkr("watch", cwd=place).returncode == 103
    finally:
        for process in filter(None, (launched, follower)):
            local_runs.end(process)


def test_a_lost_run_says_so_and_can_be_resumed_as_a_further_attempt(place: Path) -> None:
    more = _script(place, {"syncer": ["serve"], "east": ["wait", "finish"], "west": ["wait", "finish"]})
    started = local_runs.gkr("launch", "digits.yaml", "--detach", cwd=place, **more)
    assert started.returncode == 0, started.stderr
    run = find_run(started.stdout.strip(), root=place / "runs")
    local_runs.wait_until(lambda: len(_started(run.path)) == 2, "both drivers")
    pid = supervisor_pid(run.path)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    local_runs.wait_until(lambda: supervisor_pid(run.path) is None, "the supervisor's end")
    listed = local_runs.gkr("ps", cwd=place)
    assert "lost" in listed.stdout
    assert f"gkr resume {run.name}" in listed.stderr
    told = json.loads(local_runs.gkr("why", "-o", "json", cwd=place).stdout)["verdicts"]
    assert [(one["verdict"], one["action"]) for one in told] == [
        ("the run is lost", f"`gkr resume {run.name}` goes on from its checkpoints")
    ] * 2
    synced = json.loads(local_runs.gkr("sync", "-o", "json", cwd=place).stdout)["sync"]
    assert (synced["state"], [one["stage"] for one in synced["fragments"]]) == ("ENDED", [""])
    described = local_runs.gkr("describe", cwd=place).stdout
    assert "ended" in described
    assert "training" not in described
    ended = local_runs.gkr("resume", run.name, cwd=place, **more)
    assert ended.returncode == 0, ended.stderr
    assert (run.path / "logs/east/2/driver-0.log").exists()


def test_a_run_is_cancelled_before_its_supervisor_owns_it(place: Path) -> None:
    more = _script(place, {"syncer": ["serve"], "east": ["wait"], "west": ["wait"]})
    run = create_run(load_plan(place / "digits.yaml"), root=place / "runs")
    cancelling = local_runs.start("gkr", "cancel", run.name, cwd=place)
    supervisor = None
    try:
        local_runs.wait_until((run.path / "state" / "cancel").exists, "the request")
        supervisor = local_runs.start("gkr.local.supervisor", f"{run.path}", cwd=place, **more)
        said, _ = cancelling.communicate(timeout=local_runs.DEADLINE_SECONDS)
        assert (cancelling.returncode, said) == (0, f"run {run.name} cancelled\n")
        supervisor.communicate(timeout=local_runs.DEADLINE_SECONDS)
        assert supervisor.returncode == 103
    finally:
        for process in filter(None, (cancelling, supervisor)):
            local_runs.end(process)


def _started(folder: Path) -> list[str]:
    events = folder / "events.jsonl"
    return [line for line in events.read_text().splitlines() if "attempt_started" in line] if events.exists() else []


def test_plan_and_dry_run_start_nothing_and_show_origins(place: Path) -> None:
    shown = local_runs.gkr("plan", "digits.yaml", "--set", "train.batch=128", cwd=place)
    assert shown.returncode == 0, shown.stderr
    assert "digits.yaml:" in shown.stdout
    assert "--set train.batch=128" in shown.stdout
    as_json = json.loads(local_runs.gkr("launch", "digits.yaml", "--dry-run", "-o", "json", cwd=place).stdout)
    assert [one["cluster"] for one in as_json["learners"]] == ["local-0", "local-1"]
    assert as_json["learners"][0]["checkpoints"].startswith(f"{(place / 'runs').as_uri()}/digits/")
    as_yaml = local_runs.gkr("plan", "digits.yaml", "-o", "yaml", cwd=place).stdout
    assert "experiment: digits" in as_yaml
    assert not (place / "runs").exists()


def test_init_writes_a_file_that_plans_and_never_overwrites(tmp_path: Path) -> None:
    assert local_runs.gkr("init", "first", cwd=tmp_path).stdout == "first.yaml\n"
    planned = local_runs.gkr("plan", "first.yaml", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    text = (tmp_path / "first.yaml").read_text()
    again = local_runs.gkr("init", "first", cwd=tmp_path)
    assert again.returncode == 6
    assert "exists already" in again.stderr
    assert (tmp_path / "first.yaml").read_text() == text
    assert local_runs.gkr("init", "Not A Name", cwd=tmp_path).returncode == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(tmp_path: Path, shell: str) -> None:
    assert "_GKR_COMPLETE" in local_runs.gkr("completion", shell, cwd=tmp_path).stdout


def test_version_as_text_and_data(tmp_path: Path) -> None:
    assert "python 3." in local_runs.gkr("version", cwd=tmp_path).stdout
    assert "torch" in json.loads(local_runs.gkr("version", "-o", "json", cwd=tmp_path).stdout)


def test_the_report_opens_in_the_browser_also_from_a_relative_folder(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "runs")
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path / "opened"}\n')
    browser.chmod(0o755)
    ended = local_runs.gkr("report", "--open", cwd=tmp_path, BROWSER=f"{browser} %s")
    assert ended.returncode == 0, ended.stderr
    local_runs.wait_until((tmp_path / "opened").exists, "the browser")
    page = tmp_path / ended.stdout.strip()
    assert page.is_file()
    local_runs.wait_until(lambda: (tmp_path / "opened").read_text() == f"{page.as_uri()}\n", "the page's address")


def test_without_a_browser_the_report_is_left_to_the_person(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "runs")
    ended = local_runs.gkr("report", "--open", cwd=tmp_path, BROWSER="false %s")
    assert ended.returncode == 0
    assert ended.stdout.endswith("report.html\n")
    assert "no browser could be opened" in ended.stderr


def test_a_shared_service_asks_for_nothing_in_the_plan(tmp_path: Path) -> None:
    recipes = local_runs.REPOSITORY / "recipes"
    line = ["plan", f"{recipes / 'portrait-2b.yaml'}", "--facts", f"{recipes / 'example-facts.json'}"]
    planned = local_runs.gkr(*line, cwd=tmp_path, WANDB_API_KEY="x")
    assert planned.returncode == 0, planned.stderr
    rows = [line.split() for line in planned.stdout.splitlines()]
    assert ["judge", "evaluate", "east", "shared", "-", "-"] in rows
