"""What the workflows may never do; actionlint and zizmor check the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = ROOT / ".github" / "actions" / "infra" / "action.yml"


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def events(path: Path) -> set[str]:
    document = read(path)
    return set(document.get("on") or document[True])  # YAML 1.1 reads `on` as true


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return read(path)["jobs"]


def test_the_workflows_are_there() -> None:
    assert {path.stem for path in FILES} == {"preview", "deploy", "wave", "drift"}


@pytest.mark.parametrize("path", [*FILES, ACTION], ids=lambda path: path.stem)
def test_actions_of_others_are_pinned_by_commit(path: Path) -> None:
    uses = re.findall(r"uses: (\S+)(?: # (\S+))?", path.read_text(encoding="utf-8"))
    assert uses
    for name, version in uses:
        if not name.startswith("./"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name), name
            assert re.fullmatch(r"v\d+\.\d+\.\d+", version), f"{name} does not say which version it is"


def test_one_commit_per_action_everywhere() -> None:
    pins: dict[str, set[str]] = {}
    for path in (*FILES, ACTION):
        for name, commit in re.findall(r"uses: ([\w-]+/[\w-]+)@(\S+)", path.read_text(encoding="utf-8")):
            pins.setdefault(name, set()).add(commit)
    assert all(len(commits) == 1 for commits in pins.values()), pins


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_gets_only_the_permissions_it_names_and_a_deadline(path: Path) -> None:
    assert read(path)["permissions"] == {}
    for name, job in jobs(path).items():
        assert "permissions" in job, name
        assert "uses" in job or "timeout-minutes" in job, name
        writes = {key for key, value in job["permissions"].items() if value == "write"}
        assert len(writes) <= 1, f"{name}: who may write comments or issues gets no cloud identity, and the other way"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_with_a_cloud_identity_runs_in_an_environment(path: Path) -> None:
    for name, job in jobs(path).items():
        if job["permissions"].get("id-token") == "write":
            assert "environment" in job or "environment" in job.get("with", {}), name


def test_code_of_strangers_gets_no_identity() -> None:
    assert all("pull_request_target" not in events(path) for path in FILES)
    preview = jobs(ROOT / ".github" / "workflows" / "preview.yml")["preview"]
    assert "head.repo.full_name == github.repository" in preview["if"]


def test_only_a_push_to_main_or_a_person_deploys() -> None:
    for path in FILES:
        if path.stem in ("preview", "drift"):
            assert "GKR_DEPLOY_ACCOUNT" not in path.read_text(encoding="utf-8")
            assert not re.search(r"pulumi (up|destroy|refresh)\b", path.read_text(encoding="utf-8"))
    assert events(ROOT / ".github" / "workflows" / "deploy.yml") == {"push", "workflow_dispatch"}
    assert events(ROOT / ".github" / "workflows" / "wave.yml") == {"workflow_call"}


def test_a_running_update_is_never_cancelled() -> None:
    up = jobs(ROOT / ".github" / "workflows" / "wave.yml")["up"]
    assert up["concurrency"] == {"group": "stack-${{ matrix.target }}", "cancel-in-progress": False}
    assert read(ROOT / ".github" / "workflows" / "deploy.yml")["concurrency"]["cancel-in-progress"] is False


def test_every_wave_has_its_job_and_waits_for_all_before_it() -> None:
    from infra.review.affected import WAVES

    found = jobs(ROOT / ".github" / "workflows" / "deploy.yml")
    assert tuple(found) == ("plan", *WAVES)
    for index, wave in enumerate(WAVES):
        needs = found[wave]["needs"]
        assert set([needs] if isinstance(needs, str) else needs) == {"plan", *WAVES[:index]}
        assert found[wave]["with"]["environment"] == ("production" if wave.startswith("prod") else "other")


def test_no_expression_is_pasted_into_a_script() -> None:
    """A label or a branch name would otherwise be run as code."""
    for path in (*FILES, ACTION):
        document = read(path)
        steps = [step for job in document.get("jobs", {}).values() for step in job.get("steps", [])]
        for step in [*steps, *document.get("runs", {}).get("steps", [])]:
            assert "${{" not in step.get("run", ""), step


def test_paths_that_change_stacks_start_both_workflows() -> None:
    from infra.review.affected import EVERYTHING

    for stem, event in (("preview", "pull_request"), ("deploy", "push")):
        document = read(ROOT / ".github" / "workflows" / f"{stem}.yml")
        paths = (document.get("on") or document[True])[event]["paths"]
        for one in (*EVERYTHING, "stacks"):
            assert one in paths or f"{one}/**" in paths
