"""The supervisor with real children: tests/builders/standins.py, started by the product's command lines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gkr.local.commands import ProductCommands
from gkr.local.states import Limits
from gkr.local.supervisor import Supervisor
from gkr.runs import read_state, supervisor_pid
from spec.events import Event, Note, Recovery, RunStatus, read_events
from spec.link import LinkConfig
from tests.builders import local_runs, standins

Supervise = Callable[..., tuple[int, Path]]
SLOW = LinkConfig.model_validate({"delay": "10ms"})


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """Runs a supervisor in this process over stand-ins, to its end."""
    monkeypatch.chdir(standins.install(tmp_path))

    def run(behaviours: dict[str, list[str]], *, limits: Limits | None = None) -> tuple[int, Path]:
        learners = [name for name in behaviours if name != "syncer"]
        plan = local_runs.plan(*learners, synced="syncer" in behaviours)
        folder = local_runs.run_folder(tmp_path / "runs", plan)
        standins.script(folder, behaviours)
        limits = limits or Limits(grace_seconds=5, backoff_seconds=0.05)
        finish = (folder / "finished").write_text
        supervisor = Supervisor(
            folder, plan=plan, commands=ProductCommands(folder), finish=lambda _: finish("yes"), limits=limits
        )
        return supervisor.run(), folder

    return run


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        local_runs.end(process)


def _statuses(events: list[Event]) -> list[str]:
    return [event.status for event in events if isinstance(event, RunStatus)]


def _recoveries(events: list[Event]) -> list[Recovery]:
    return [event for event in events if isinstance(event, Recovery)]


def test_a_run_whose_drivers_all_finish_succeeds_and_is_concluded(supervise: Supervise) -> None:
    code, folder = supervise({"syncer": ["serve"], "east": ["finish"], "west": ["finish"]})
    assert code == 0
    assert _statuses(local_runs.events(folder)) == ["preparing", "running", "succeeded"]
    assert (folder / "finished").read_text() == "yes"
    assert "syncer serves" in (folder / "logs/run/1/syncer-0.log").read_text()
    assert "driver east attempt 1" in (folder / "logs/east/1/driver-0.log").read_text()
    assert not (folder / "state" / "reserve").exists()


def test_a_killed_driver_comes_back_as_the_next_attempt_with_its_cause_and_times(supervise: Supervise) -> None:
    code, folder = supervise({"syncer": ["serve"], "east": ["killed", "finish"], "west": ["finish"]})
    assert code == 0
    (recovery,) = _recoveries(local_runs.events(folder))
    assert (recovery.learner, recovery.what, recovery.cause) == ("east", "driver", "SIGKILL")
    assert recovery.detected_seconds < 1.0
    assert recovery.first_step_seconds is not None
    assert recovery.lost_steps == 128 // 64
    assert (folder / "logs/east/2/driver-0.log").exists()


def test_a_killed_syncer_comes_back_at_the_same_ports_while_drivers_run_on(supervise: Supervise) -> None:
    code, folder = supervise({"syncer": ["killed", "serve"], "east": ["finish-after-syncer"]})
    assert code == 0
    (recovery,) = _recoveries(local_runs.events(folder))
    assert (recovery.what, recovery.cause, recovery.first_step_seconds) == ("syncer", "SIGKILL", None)
    served = [(folder / f"logs/run/{start}/syncer-0.log").read_text() for start in (1, 2)]
    assert served[0] == served[1]


def test_a_driver_that_dies_again_and_again_without_progress_fails_the_run(supervise: Supervise) -> None:
    code, folder = supervise({"east": ["killed-early"]})
    assert code == 100
    state = read_state(folder)
    assert state.status == "failed"
    assert "SIGKILL after 3 restarts without progress" in state.reason
    assert len(_recoveries(local_runs.events(folder))) == 3
    assert (folder / "finished").exists(), "a failed run is concluded too"


def test_a_users_error_ends_the_run_at_once_with_the_last_line(supervise: Supervise) -> None:
    code, folder = supervise({"syncer": ["serve"], "east": ["exit:100"], "west": ["wait"]})
    assert code == 100
    assert "ValueError: shape (3,) is not (4,)" in read_state(folder).reason
    assert not (folder / "logs/east/2").exists()


def test_the_exit_code_of_the_run_is_the_drivers(supervise: Supervise) -> None:
    code, folder = supervise({"east": ["exit:5"]})
    assert (code, read_state(folder).exit_code) == (5, 5)


def test_a_syncer_that_never_serves_fails_the_run_within_its_deadline(supervise: Supervise) -> None:
    limits = Limits(serve_seconds=0.3, restarts=1, backoff_seconds=0.0)
    code, folder = supervise({"syncer": ["never-serve"], "east": ["finish"]}, limits=limits)
    assert code == 100
    assert "no endpoints within 0.3 s" in read_state(folder).reason


def test_what_a_dead_driver_left_in_its_process_group_is_killed(supervise: Supervise) -> None:
    code, folder = supervise({"east": ["grandchild:die", "finish"]})
    assert code == 0
    pid = int((folder / "state" / "grandchild").read_text())
    local_runs.wait_until(lambda: not local_runs.is_alive(pid), "the grandchild's end")


def test_a_report_that_cannot_be_made_does_not_change_the_fate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(standins.install(tmp_path))
    plan = local_runs.plan("east", synced=False)
    folder = local_runs.run_folder(tmp_path / "runs", plan)
    standins.script(folder, {"east": ["finish"]})

    def fail(_: Path) -> None:
        raise ValueError("no such picture")

    assert Supervisor(folder, plan=plan, commands=ProductCommands(folder), finish=fail).run() == 0
    note = local_runs.events(folder)[-1]
    assert isinstance(note, Note)
    assert "no such picture" in note.text
    assert read_state(folder).status == "succeeded"


def test_a_full_disk_ends_the_run_with_one_clear_reason(tmp_path: Path) -> None:
    """On a real file system of 256 KiB, mounted in a namespace of its own."""
    standins.install(tmp_path)
    plan = local_runs.plan("east", synced=False)
    inside = """
        mount -t tmpfs -o size=256k none small || exit 77
        cp -r template/. small/
        (while [ ! -s small/state/standin ]; do sleep 0.02; done
         cat /dev/zero > small/big; kill -9 $(cat small/state/standin)) 2>/dev/null &
        "$0" -m gkr.local.supervisor small
        code=$?; cp small/events.jsonl seen.jsonl; exit $code
    """
    template = local_runs.run_folder(tmp_path / "runs", plan)
    standins.script(template, {"east": ["pid"]})
    (tmp_path / "template").symlink_to(template)
    (tmp_path / "small").mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, sys.executable]
    ended = subprocess.run(
        command, cwd=tmp_path, env=local_runs.environment(), capture_output=True, timeout=60, check=False
    )
    if ended.returncode in {1, 77} and b"gkr" not in ended.stderr:
        pytest.skip(f"cannot mount in a namespace here: {ended.stderr.decode()}")
    assert ended.returncode == 100, ended.stderr
    last = [
        event
        for event in read_events((tmp_path / "seen.jsonl").read_text().splitlines())
        if isinstance(event, RunStatus)
    ][-1]
    assert (last.status, last.exit_code) == ("failed", 100)
    assert "No space left on device" in last.reason


def _spawn(folder: Path, cwd: Path) -> subprocess.Popen[str]:
    process = local_runs.start("gkr.local.supervisor", f"{folder}", cwd=cwd)
    local_runs.wait_until(lambda: supervisor_pid(folder) == process.pid, "the supervisor's announcement")
    return process


def _started(tmp_path: Path, behaviours: dict[str, list[str]], *, link: LinkConfig | None = None) -> Path:
    standins.install(tmp_path)
    learners = [name for name in behaviours if name != "syncer"]
    plan = local_runs.plan(*learners, synced="syncer" in behaviours, link=link)
    folder = local_runs.run_folder(tmp_path / "runs", plan)
    standins.script(folder, behaviours)
    return folder


def _children(supervisor: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def test_children_die_when_the_supervisor_is_killed_and_the_run_shows_as_lost(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    folder = _started(tmp_path, {"syncer": ["serve"], "east": ["wait"]}, link=SLOW)
    supervisor = _spawn(folder, tmp_path)
    processes.append(supervisor)
    local_runs.wait_until(lambda: read_state(folder).status == "running", "the run to run")
    children = _children(supervisor)
    assert len(children) == 3, "syncer, link and driver"
    os.kill(supervisor.pid, signal.SIGKILL)
    local_runs.wait_until(lambda: not any(map(local_runs.is_alive, children)), "the children's end")
    assert read_state(folder).status == "lost"


def test_a_link_stands_between_driver_and_syncer_and_comes_back_on_its_ports(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    folder = _started(tmp_path, {"syncer": ["serve"], "east": ["wait"]}, link=SLOW)
    supervisor = _spawn(folder, tmp_path)
    processes.append(supervisor)
    local_runs.wait_until(lambda: read_state(folder).status == "running", "the run to run")

    def links() -> list[int]:
        return [pid for pid in _children(supervisor) if "gkr.local.link" in _words(pid)]

    (driver,) = [_words(pid) for pid in _children(supervisor) if "training.driver" in _words(pid)]
    served = json.loads((folder / "state" / "syncer.json").read_text())
    reached = {one: driver[driver.index(f"--syncer-{one}") + 1] for one in ("control", "bulk")}
    (first,) = links()
    targets = [word for word in _words(first) if word in served.values()]
    assert targets == [served["control"], served["bulk"]]
    assert not set(reached.values()) & set(served.values())
    os.kill(first, signal.SIGKILL)
    local_runs.wait_until(lambda: links() not in ([], [first]), "the link to be started again")
    host, _, port = reached["control"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=local_runs.DEADLINE_SECONDS):
        assert (folder / "logs" / "east" / "2" / "link-0.log").exists()
    (folder / "state" / "cancel").write_text(json.dumps({"now": True}))
    (second,) = links()
    assert supervisor.wait(timeout=local_runs.DEADLINE_SECONDS) == 103
    assert not local_runs.is_alive(second)


def test_cancel_asks_then_kills_after_the_grace(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    folder = _started(tmp_path, {"syncer": ["serve"], "east": ["ignore-term"], "west": ["wait"]})
    supervisor = _spawn(folder, tmp_path)
    processes.append(supervisor)
    local_runs.wait_until((folder / "state" / "ignoring").exists, "a driver that ignores SIGTERM")
    (folder / "state" / "cancel").write_text(json.dumps({"now": False}))
    supervisor.send_signal(signal.SIGTERM)
    local_runs.wait_until(lambda: "west" not in _alive_drivers(folder), "the polite driver's end")
    assert "east" in _alive_drivers(folder), "the grace of 60 s is not over"
    (folder / "state" / "cancel").write_text(json.dumps({"now": True}))
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=local_runs.DEADLINE_SECONDS) == 103
    state = read_state(folder)
    assert (state.status, state.exit_code, state.reason) == ("cancelled", 103, "cancelled on request")
    assert (folder / "summary.json").exists()


def _alive_drivers(folder: Path) -> set[str]:
    found: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if f"{folder}" in words and "--learner" in words and local_runs.is_alive(int(entry.name)):
            found.add(words[words.index("--learner") + 1])
    return found
