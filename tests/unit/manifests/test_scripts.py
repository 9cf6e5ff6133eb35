"""The scripts of the pods, run by a real bash with the real programs they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manifests import scripts
from tests.builders.plans import digits

SHOW = 'printf \'%s|\' "$GKR_ROLE" "${PYTHONPATH:-}" "${FROM_PROFILE:-}"; exit 7'


def start(tmp_path: Path, *, script: str = scripts.START, **env: str) -> subprocess.CompletedProcess[str]:
    """start.sh with `training.pod`, whose bucket is a folder."""
    plan = digits()
    learners = [one.model_copy(update={"run_uri": (tmp_path / "bucket").as_uri()}) for one in plan.learners]
    (tmp_path / "plan.json").write_text(plan.model_copy(update={"learners": learners}).write_json())
    (tmp_path / "start.sh").write_text(script)
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "GKR_LEARNER": "east",
        "GKR_PLAN": str(tmp_path / "plan.json"),
        "GKR_ROLE": "trainer",
        "GKR_RUN_DIR": str(tmp_path / "run"),
        "KUBERAY_GEN_RAY_START_CMD": SHOW,
        "PYTHONPATH": os.getcwd(),  # noqa: PTH109
    }
    return subprocess.run(
        ["bash", str(tmp_path / "start.sh")],
        env={**own, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )


def test_start_runs_what_kuberay_would_have_run_and_ends_with_its_code(tmp_path: Path) -> None:
    done = start(tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("trainer|")


def test_a_persons_code_comes_before_the_images(tmp_path: Path) -> None:
    done = start(tmp_path, GKR_CODE_DIR="/gkr/code", PYTHONPATH=str(Path.cwd()))
    assert done.stdout.split("|")[1] == f"/gkr/code:{Path.cwd()}"


def test_the_fabrics_profile_is_in_the_environment_even_if_it_is_careless(tmp_path: Path) -> None:
    profile = tmp_path / "profile.sh"
    profile.write_text('false\nexport FROM_PROFILE="set $NOT_SET"\n')
    done = start(tmp_path, GKR_NCCL_PROFILE=str(profile))
    assert done.returncode == 7, done.stderr
    assert done.stdout.split("|")[2] == "set "


def test_without_the_profile_it_stops_and_says_what_is_missing(tmp_path: Path) -> None:
    done = start(tmp_path, GKR_NCCL_PROFILE="/usr/local/gib/none.sh", GKR_POD_NODE="node-3")
    assert done.returncode == 1
    assert "/usr/local/gib/none.sh is not on node node-3" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("script", [scripts.START, scripts.DRIVER, scripts.SYNCER])
def test_bash_accepts_it(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)


def test_the_driver_is_told_everything_by_its_environment() -> None:
    done = subprocess.run(
        ["bash", "-c", scripts.DRIVER],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "GKR_" in done.stderr


def test_the_syncers_options_are_those_of_its_program() -> None:
    line = scripts.SYNCER.split("training.sync.server", 1)[1].replace("\\\n", " ")
    done = subprocess.run(
        [sys.executable, "-m", "training.sync.server", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    wanted = [word for word in line.split() if word.startswith("--")]
    assert wanted
    assert [word for word in wanted if word not in done.stdout] == []
