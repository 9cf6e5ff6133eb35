"""What a person can get wrong, end to end: one clear error with place and remedy, its code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

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
