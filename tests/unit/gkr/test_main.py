"""The door: what help costs, what errors look like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gkr.main import COMMANDS, main
from tests.builders import local_runs

HEAVY = {
    "torch",
    "ray",
    "pydantic",
    "yaml",
    "rich",
    "matplotlib",
    "numpy",
    "psutil",
    "http",
    "urllib.request",
    "zmq",
    "asyncio",
}


def _modules_after(code: str, cwd: Path, **more: str) -> set[str]:
    report = "import sys, atexit\natexit.register(lambda: print('\\n'.join(sys.modules), file=sys.stderr))\n"
    environment = local_runs.environment(**more)
    ended = subprocess.run(
        [sys.executable, "-c", report + code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "gkr.main" in ended.stderr
    return set(ended.stderr.split())


@pytest.mark.parametrize(
    "line",
    [
        ["--help"],
        ["launch", "--help"],
        ["logs", "--help"],
        ["ps", "--help"],
        ["explain", "--help"],
        ["completion", "bash"],
    ],
)
def test_help_imports_nothing_heavy(tmp_path: Path, line: list[str]) -> None:
    loaded = _modules_after(f"from gkr.main import main\nmain({line!r})", tmp_path)
    assert loaded & HEAVY == set()


def test_completing_a_run_imports_nothing_heavy_and_finds_it(tmp_path: Path) -> None:
    local_runs.run_folder(tmp_path / "runs", local_runs.plan(run="20261130-120000-abc123"))
    more = {"_GKR_COMPLETE": "bash_complete", "COMP_WORDS": "gkr logs 2026", "COMP_CWORD": "2"}
    assert _modules_after("from gkr.main import main\nmain([])", tmp_path, **more) & HEAVY == set()
    assert "20261130-120000-abc123" in local_runs.gkr(cwd=tmp_path, **more).stdout


def test_every_command_of_the_table_has_its_module_and_answers_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert "Usage: gkr " + name in capsys.readouterr().out


def test_an_unknown_command_names_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanuch"]) == 2
    assert 'did you mean "launch"?' in capsys.readouterr().err


def test_errors_as_data_when_json_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("version: 1\nname: x\nlearnrs: []\n")
    ended = local_runs.gkr("plan", "x.yaml", "-o", "json", cwd=tmp_path)
    assert ended.returncode == 3
    assert ended.stdout == ""
    (first, *_) = json.loads(ended.stderr)["error"]["problems"]
    assert (first["file"], first["line"], first["column"]) == ("x.yaml", 3, 1)


def test_debug_shows_the_traceback_of_a_persons_error(tmp_path: Path) -> None:
    assert "Traceback" in local_runs.gkr("--debug", "plan", "missing.yaml", cwd=tmp_path).stderr


def test_python_dash_m_gkr_is_the_same_program(tmp_path: Path) -> None:
    assert local_runs.gkr("--help", cwd=tmp_path).stdout.startswith("Usage: gkr ")


@pytest.mark.parametrize(("line", "want"), [
    (["ps", "--bogus", "-o", "json"], "No such option"),
    (["lanuch", "--output=json"], "did you mean"),
    (["plan", "-ojson"], "Missing argument"),
])  # fmt: skip
def test_a_usage_error_is_data_too_when_json_is_asked_for(
    capsys: pytest.CaptureFixture[str], line: list[str], want: str
) -> None:
    assert main(line) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert want in error["message"]
    assert (error["exit_code"], error["hint"].endswith("--help`")) == (2, True)


def test_options_of_another_program_are_not_ours(tmp_path: Path) -> None:
    ended = local_runs.gkr("exec", "nope", "--", "kubectl", "get", "pods", "-o", "json", "--debug", cwd=tmp_path)
    assert ended.stderr.startswith("error: there are no runs")


def _redirected(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A shell's redirections around `gkr`, which is $0 -m gkr there."""
    return subprocess.run(
        ["bash", "-c", line, sys.executable],
        cwd=cwd,
        env=local_runs.environment(),
        capture_output=True,
        text=True,
        timeout=local_runs.DEADLINE_SECONDS,
        check=False,
    )


def test_a_full_disk_under_the_output_is_one_clear_error(tmp_path: Path) -> None:
    ended = _redirected('"$0" -m gkr version >/dev/full', tmp_path)
    assert ended.returncode == 100
    assert ended.stderr.startswith("error: No space left on device\n  hint:")


def test_an_error_that_cannot_be_told_keeps_its_code(tmp_path: Path) -> None:
    assert _redirected('"$0" -m gkr describe nope 2>/dev/full', tmp_path).returncode == 102
    assert _redirected('"$0" -m gkr lanuch 2>/dev/full', tmp_path).returncode == 2


@pytest.mark.parametrize("command", ["--help", "version", "explain"])
def test_a_reader_that_went_away_is_no_error(tmp_path: Path, command: str) -> None:
    """The pipe's other end is closed before the first byte is written."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "gkr", command],
        cwd=tmp_path,
        env=local_runs.environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    _, said = process.communicate(timeout=local_runs.DEADLINE_SECONDS)
    assert (process.returncode, said) == (0, "")


def test_no_help_line_of_a_subcommand_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("data", "clusters"):
        assert main([name, "--help"]) == 0
        assert "..." not in capsys.readouterr().out.partition("Commands:")[2]
