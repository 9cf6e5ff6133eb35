"""Who is asked about the sync of a run, and what stands in when nobody answers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from gkr.commands.sync import command
from gkr.runs import Run, process_birth
from gkr.syncing.asking import look
from spec.errors import NotFoundError, UnreachableError
from spec.events import RunStatus, write_event
from spec.sync_status import FragmentStatus, MemberStatus, SyncStatus, ask_syncer
from tests.builders import local_runs
from tests.builders.synthetic_run import write_synthetic_run
from training.sync import messages


class StatusDouble:
    """STANDS IN for the syncer's control port: a real socket that gives one prepared answer."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = (200, b"{}")
        self.asked: list[str] = []
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                double.asked.append(self.path)
                status, body = double.answer
                self.send_response(status)
                self.send_header("Content-Length", f"{len(body)}")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def double() -> Iterator[StatusDouble]:
    made = StatusDouble()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join(timeout=30)


def running(tmp_path: Path, *, address: str) -> Run:
    """A run whose supervisor seems to live: this process."""
    folder = write_synthetic_run(tmp_path, finished=False)
    (folder / "state").mkdir()
    (folder / "state" / "syncer.json").write_text(json.dumps({"control": address, "bulk": address, "pid": 1}))
    supervisor = {"pid": os.getpid(), "birth": process_birth(os.getpid()), "started": 0.0}
    (folder / "state" / "supervisor.json").write_text(json.dumps(supervisor))
    return Run("digits", folder.name, folder, created=0.0)


def status(**fields: Any) -> bytes:
    """As the real syncer writes it."""
    whole: dict[str, Any] = {
        "run": "r", "epoch": 4, "version": 9, "state": "SERVING", "stage": "", "round": 10, "arrived": [],
        "waiting_for": [], "until": None, "members": [], "samples_total": 5, "target_samples": 10, "model_sha256": "",
        "theta_sha256": "", "final": False,
    }  # fmt: skip
    return messages.encode(messages.Status(**{**whole, **fields}))


def test_the_running_syncer_is_asked(tmp_path: Path, double: StatusDouble) -> None:
    run = running(tmp_path, address=double.address)
    double.answer = (200, status(alarm="the disk is full"))
    seen = look(run, clock=lambda: 7.0)
    assert (seen.source, seen.seen, seen.trouble, seen.over) == ("syncer", 7.0, "", False)
    assert (seen.status.epoch, seen.status.alarm) == (4, "the disk is full")
    assert double.asked == [f"/v1/{run.name}/status"]


@pytest.mark.parametrize(
    ("answer", "want"),
    [((503, b'{"reason": "stopping"}'), "refuses"), ((200, b"{}"), "cannot be read"), ((200, b"x"), "cannot be read")],
)
def test_events_stand_in_for_an_answer_that_is_none(
    tmp_path: Path, double: StatusDouble, answer: tuple[int, bytes], want: str
) -> None:
    double.answer = answer
    seen = look(running(tmp_path, address=double.address))
    assert seen.source == "events"
    assert want in seen.trouble
    assert seen.status.version == 16


def test_a_syncer_that_is_gone_is_said_with_its_address(tmp_path: Path, double: StatusDouble) -> None:
    address = double.address
    double.server.server_close()
    seen = look(running(tmp_path, address=address))
    assert (seen.source, seen.status.version) == ("events", 16)
    assert f"the syncer at {address} does not answer" in seen.trouble
    with pytest.raises(UnreachableError):
        ask_syncer("127.0.0.1:no-port", run="r", path="status", keys=None, timeout_seconds=1)


def test_a_run_that_ended_is_told_by_its_events_alone(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path)
    seen = look(Run("digits", folder.name, folder, created=0.0))
    assert (seen.source, seen.run_state, seen.over, seen.trouble) == ("events", "succeeded", True, "")
    assert seen.status.final


def test_a_run_without_a_syncer_says_so(tmp_path: Path) -> None:
    plan = local_runs.plan("east", synced=False)
    folder = local_runs.run_folder(tmp_path, plan)
    with pytest.raises(NotFoundError, match="has no syncer"):
        look(Run("digits", folder.name, folder, created=0.0))


@pytest.mark.parametrize(
    ("read", "written"),
    [
        (SyncStatus, messages.Status),
        (MemberStatus, messages.MemberStatus),
        (FragmentStatus, messages.FragmentStatus),
    ],
)
def test_reader_and_writer_of_the_status_agree(read: type[Any], written: type[msgspec.Struct]) -> None:
    first_fragments = {"stage", "round", "arrived", "waiting_for", "until"} if read is SyncStatus else set[str]()
    assert set(read.model_fields) == set(written.__struct_fields__) - first_fragments


def test_the_command_prints_text_and_json(tmp_path: Path) -> None:
    folder = write_synthetic_run(tmp_path)
    shown = local_runs.gkr("sync", folder.name, "--watch", cwd=tmp_path, GKR_RUNS=f"{tmp_path}")
    assert shown.returncode == 0, shown.stderr
    assert "the last merge is published" in shown.stdout
    told = local_runs.gkr("sync", folder.name, "-o", "json", cwd=tmp_path, GKR_RUNS=f"{tmp_path}")
    document = json.loads(told.stdout)
    assert (document["source"], document["sync"]["version"]) == ("events", 16)


def test_watch_looks_until_the_run_has_ended(
    tmp_path: Path, double: StatusDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = running(tmp_path / "runs", address=double.address)
    double.answer = (200, status())
    ended = RunStatus(time=1.0, source="supervisor", status="succeeded", exit_code=0)

    def end(_: float) -> None:
        with (run.path / "events.jsonl").open("a") as file:
            file.write(write_event(ended))

    monkeypatch.setenv("GKR_RUNS", f"{tmp_path / 'runs'}")
    monkeypatch.setattr("time.sleep", end)
    shown = CliRunner().invoke(command, [run.name, "--watch", "-o", "json"])
    looks = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(one["source"], one["run_state"]) for one in looks] == [("syncer", "running"), ("events", "succeeded")]
