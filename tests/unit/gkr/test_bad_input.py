"""What a person can get wrong, end to end: one clear error with place and remedy, its code, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gkr.main import main
from tests.builders import local_runs

DIGITS = (local_runs.REPOSITORY / "recipes" / "digits.yaml").read_text()

CASES = {
    "unknown key": (DIGITS.replace("services:", "servces:"), "unknown key", 3),
    "wrong unit": (DIGITS.replace("memory: 2Gi, shm: 256Mi", "memory: 2GB, shm: 256Mi", 1), "2GB", 3),
    "no unit": (DIGITS.replace("memory: 2Gi, shm: 256Mi", "memory: 64, shm: 256Mi", 1), "has no unit", 3),
    "wrong type": (DIGITS.replace("nodes: 1", "nodes: one", 1), "expected a whole number", 3),
    "duplicate key": (DIGITS + "name: again\n", "name", 3),
    "tab": (DIGITS.replace("  - name: east", "\t- name: east"), "tab", 3),
    "empty file": ("", "empty", 3),
    "a list": ("- 1\n- 2\n", "", 3),
    "not UTF-8": ("name: \udcff\n", "UTF-8", 3),
    "GPU that does not exist": (DIGITS.replace("cpu: 1, memory: 2Gi", "gpu: 'H2000:8', memory: 2Gi", 1), "H2000", 3),
    "more nodes than the cluster has": (DIGITS.replace("nodes: 1", "nodes: 99", 1), "99", 3),
    "recipe that does not exist": (DIGITS.replace("recipe: digits", "recipe: digit"), 'did you mean "digits"?', 3),
    "name of the link to the newest run": (DIGITS.replace("name: digits", "name: latest"), '"latest" is reserved', 3),
    "cluster that does not exist": (DIGITS.replace("local-1", "locl-1"), "locl-1", 3),
    "machine of another cluster": ((local_runs.REPOSITORY / "recipes" / "portrait-2b.yaml").read_text(), "us-east5", 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, case: str) -> None:
    text, want, code = CASES[case]
    (tmp_path / "bad.yaml").write_bytes(text.encode(errors="surrogateescape"))
    ended = local_runs.gkr("launch", "bad.yaml", cwd=tmp_path, WANDB_API_KEY="x")
    assert ended.returncode == code, ended.stderr
    assert want in ended.stderr
    assert "bad.yaml" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


@pytest.mark.parametrize(("line", "want"), [
    (["launch", "missing.yaml"], "there is no file missing.yaml"),
    (["plan", "."], "is a folder"),
    (["plan", "good.yaml/x"], "there is no file good.yaml/x"),
    (["plan", "/dev/zero"], "has more than 1048576 bytes"),
    (["plan", "good.yaml", "--facts", "good.yaml"], "these are not the facts of a cluster: Invalid JSON"),
    (["launch", "good.yaml", "--set", "train.batchh=3"], "--set train.batchh=3"),
    (["launch", "good.yaml", "--set", "train.batch"], "expected a.b=value"),
    (["launch", "good.yaml", "--set", "train.batch=63"], "use 62 or 64"),
])  # fmt: skip
def test_a_bad_command_line_is_a_config_error_too(tmp_path: Path, line: list[str], want: str) -> None:
    (tmp_path / "good.yaml").write_text(DIGITS)
    ended = local_runs.gkr(*line, cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    assert want in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "line",
    [
        ["logs", "nope"],
        ["describe", "nope"],
        ["cancel", "nope"],
        ["report", "nope"],
        ["watch", "nope"],
        ["explain", "train.btch"],
    ],
)
def test_what_does_not_exist_is_code_102(tmp_path: Path, line: list[str]) -> None:
    local_runs.run_folder(tmp_path / "runs", local_runs.plan())
    ended = local_runs.gkr(*line, cwd=tmp_path)
    assert ended.returncode == 102
    assert "hint:" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_runs_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(DIGITS)
    (tmp_path / "file").write_text("")
    ended = local_runs.gkr("launch", "good.yaml", cwd=tmp_path, GKR_RUNS="file")
    assert ended.returncode == 6
    assert "cannot write the run's folder" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_list_of_no_clusters_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(DIGITS)
    ended = local_runs.gkr("plan", "good.yaml", "--cluster", ",", cwd=tmp_path)
    assert (ended.returncode, '"," names no cluster' in ended.stderr) == (2, True)


PLANS = {"half a plan": '{"version": 1, "exp', "empty": "", "another document": '{"a": 1}', "no text": "\x00\udcff"}


@pytest.mark.parametrize("case", PLANS)
@pytest.mark.parametrize("command", ["describe", "watch", "sync", "services", "why", "report"])
def test_a_run_whose_plan_is_damaged_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str, command: str
) -> None:
    monkeypatch.setenv("GKR_RUNS", f"{tmp_path}")
    folder = local_runs.run_folder(tmp_path, local_runs.plan())
    (folder / "plan.json").write_bytes(PLANS[case].encode(errors="surrogateescape"))
    assert main([command]) == 100
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder}/plan.json: this is not the plan of a run: ")
    assert "hint:" in said


def test_a_run_whose_plan_is_damaged_can_be_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GKR_RUNS", f"{tmp_path}")
    folder = local_runs.run_folder(tmp_path, local_runs.plan())
    (folder / "plan.json").write_text("{")
    (folder / "state" / "supervisor.json").write_text("{}")
    assert main(["cancel"]) == 0
    assert capsys.readouterr().out == f"run {folder.name} is lost; nothing of it is alive\n"


def test_a_run_that_cannot_be_read_is_named_and_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GKR_RUNS", f"{tmp_path}")
    local_runs.run_folder(tmp_path, local_runs.plan(run="20261130-120000-aaaaaa"))
    damaged = local_runs.run_folder(tmp_path, local_runs.plan(run="20261130-120000-bbbbbb"))
    (damaged / "events.jsonl").mkdir()
    assert main(["ps", "-o", "json"]) == 0
    rows = {one["run"][-6:]: one for one in json.loads(capsys.readouterr().out)}
    assert (rows["aaaaaa"]["status"], rows["bbbbbb"]["status"]) == ("starting", "unreadable")
    assert rows["bbbbbb"]["reason"] == f"{damaged}/events.jsonl: Is a directory"
    assert main(["describe", "bbbbbb"]) == 100
    assert capsys.readouterr().err.startswith(f"error: {damaged}/events.jsonl: Is a directory\n  hint:")
