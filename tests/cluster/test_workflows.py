"""actionlint over GitHub's workflows. It comes as Go source only, so it is run where the other tools are built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import binaries

pytestmark = pytest.mark.cluster
FILES = sorted((Path(__file__).resolve().parents[2] / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def actionlint() -> Path:
    binaries.build(["actionlint"])
    return binaries.binary("actionlint")


def lint(actionlint: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    # Without the checkers that it calls where they happen to be installed: every machine says the same.
    command = [actionlint, "-shellcheck=", "-pyflakes=", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_every_workflow_is_one_that_github_understands(actionlint: Path) -> None:
    assert FILES
    done = lint(actionlint, *FILES)
    assert done.returncode == 0, done.stdout


def test_a_job_that_waits_for_none_is_found(actionlint: Path, tmp_path: Path) -> None:
    text = FILES[0].read_text(encoding="utf-8")
    assert "needs: " in text
    broken = tmp_path / "workflow.yml"
    broken.write_text(text.replace("needs: ", "needs: nobody-", 1), encoding="utf-8")
    done = lint(actionlint, broken)
    assert done.returncode == 1
    assert "nobody-" in done.stdout
