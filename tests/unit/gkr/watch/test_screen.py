"""The live screen, drawn by rich into text, and once on a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gkr.watch.screen import frame
from gkr.watch.view import View
from spec.events import Recovery, RunStatus, ServiceStats, SyncWaiting, write_event
from tests.builders import local_runs
from tests.builders.watched import merged, seen, step


def _drawn(view: View, *, width: int = 140, ascii_only: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    console.print(frame(view, now=1030.0, width=width, ascii_only=ascii_only))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _busy() -> View:
    stats = ServiceStats(
        time=1020.0,
        source="driver/east",
        learner="east",
        service="encoder",
        replica=0,
        incarnation=1,
        requests=400,
        errors=0,
        p50_ms=3.1,
        p99_ms=17.8,
        queued=2,
    )
    waiting = SyncWaiting(
        time=1021.0, source="syncer", round=1, arrived=["east"], waiting_for=["west"], deadline=1090.0
    )
    recovery = Recovery(
        time=1022.0,
        source="driver/west",
        learner="west",
        what="rank 1",
        cause="SIGKILL",
        action="respawned",
        detected_seconds=0.1,
    )
    steps = [step("east", index, time=1000.0, loss=1.0 / (1 + index)) for index in range(40)]
    return seen(*steps, step("west", 7, time=1000.0), merged(1, samples_total=2_560), stats, waiting, recovery)


def test_everything_a_person_wants_to_know_is_on_the_screen() -> None:
    text = _drawn(_busy())
    for want in (
        "east x2",
        "0.025",
        "8",
        "outer round 2",
        "waits for west",
        "at most 1m00s more",
        "encoder-0",
        "3.1",
        "17.8",
        "rank 1 of west (SIGKILL)",
        "elapsed 30s",
        "left",
        "of 51.2k samples",
    ):
        assert want in text, f"{want} is not in\n{text}"


def test_before_the_first_event_there_is_a_screen_too() -> None:
    assert "waiting" in _drawn(seen())


@pytest.mark.parametrize(("width", "wanted", "left_out"), [
    (40, ["east x2", "training", "0.025", "p99 ms"], ["steps/s", "queued"]),
    (60, ["east x2", "training", "0.025", "steps/s", "p50 ms"], ["saved"]),
    (80, ["east x2", "training", "0.025", "steps/s", "round", "stood still"], []),
    (100, ["east x2", "training", "0.025", "steps/s", "round", "queue", "saved", "stood still", "\u2588"], []),
])  # fmt: skip
def test_on_a_narrow_terminal_what_matters_less_gives_way_and_nothing_is_cut(
    width: int, wanted: list[str], left_out: list[str]
) -> None:
    text = _drawn(_busy(), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\u2026" not in text, f"something is cut in\n{text}"
    assert [one for one in wanted if one not in text] == [], text
    assert [one for one in left_out if one in text] == [], text


def test_without_unicode_the_loss_line_is_ascii() -> None:
    assert "\u2588" not in _drawn(_busy(), ascii_only=True)


@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_watching_on_a_terminal_draws_and_ends_with_the_fate(tmp_path: Path, terminal: str) -> None:
    folder = local_runs.run_folder(tmp_path / "runs", local_runs.plan())
    ended = RunStatus(
        time=1030.0, source="supervisor", status="failed", reason="rank 1 is out of memory", exit_code=100
    )
    (folder / "events.jsonl").write_text(write_event(step("east", 40, time=1000.0)) + write_event(ended))
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gkr", "watch"],
        cwd=tmp_path,
        env=local_runs.environment(TERM=terminal, COLUMNS="120"),
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 65536):
            drawn += chunk
    except OSError:
        pass  # Linux answers EIO when the other end is closed: the program has ended
    stdout, _ = process.communicate(timeout=local_runs.DEADLINE_SECONDS)
    os.close(ours)
    assert process.returncode == 100
    want = "east: step 40" if terminal == "dumb" else "east x2"  # a dumb one gets lines, as a pipe does
    assert want in drawn.decode(errors="replace")
    assert "rank 1 is out of memory" in stdout
