"""What the workflows may never do; actionlint and zizmor check the rest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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


def test_paths_that_change_stacks_start_a_deployment() -> None:
    from infra.review.affected import EVERYTHING

    document = read(ROOT / ".github" / "workflows" / "deploy.yml")
    paths = (document.get("on") or document[True])["push"]["paths"]
    for one in (*EVERYTHING, "stacks"):
        assert one in paths or f"{one}/**" in paths


def test_the_required_check_runs_on_every_pull_request() -> None:
    """Branch protection waits for a check that no run reports, and a workflow whose paths do not match never runs."""
    path = ROOT / ".github" / "workflows" / "preview.yml"
    assert "reviewed" in jobs(path)
    assert jobs(path)["reviewed"]["if"] == "always()"
    document = read(path)
    assert set((document.get("on") or document[True])["pull_request"]) == {"types"}


GH = """\
#!/bin/sh
case "$*" in
  "run list --workflow deploy.yml --branch main --status success"*) cat deployed ;;
  "api repos/owner/name/commits/"*"/pulls "*) commit=${2#repos/owner/name/commits/}; cat "labels-${commit%/pulls}" ;;
  *) echo "the double does not know: $*" >&2; exit 1 ;;
esac
"""
"""In gh's place: the last deployment that succeeded, and the labels of each commit's pull request."""


class Landed:
    """A clone whose main got some pull requests, and the step that plans their deployment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gh").write_text(GH, encoding="utf-8")
        (folder / "gh").chmod(0o755)
        python = folder / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        shutil.copytree(ROOT / "stacks", folder / "stacks")
        self.git("init", "--quiet", "--initial-branch=main")
        (folder / ".git" / "info" / "exclude").write_text("/*\n!/stacks\n", encoding="utf-8")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *words]
        return subprocess.run(
            command, cwd=self.folder, check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    def land(self, stack: str, *labels: str) -> str:
        path = self.folder / "stacks" / f"Pulumi.{stack}.yaml"
        path.write_text(path.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
        self.git("add", "stacks")
        self.git("commit", "--quiet", "--message", stack)
        commit = self.git("rev-parse", "HEAD")
        (self.folder / f"labels-{commit}").write_text("".join(f"{one}\n" for one in labels), encoding="utf-8")
        return commit

    def planned(self, *, deployed: str, everything: str = "") -> tuple[set[str], list[str]]:
        """Targets of all waves, and labels."""
        (self.folder / "deployed").write_text(deployed, encoding="utf-8")
        output = self.folder / "output"
        output.unlink(missing_ok=True)
        [step] = [
            one for one in jobs(ROOT / ".github/workflows/deploy.yml")["plan"]["steps"] if one.get("id") == "plan"
        ]
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin", "PYTHONPATH": f"{ROOT}", "GITHUB_OUTPUT": f"{output}",
            "GITHUB_SHA": self.git("rev-parse", "HEAD"), "GH_REPO": "owner/name", "ALL": everything,
        }  # fmt: skip
        command = ["bash", "-euo", "pipefail", "-c", step["run"]]
        subprocess.run(command, cwd=self.folder, env=environment, check=True, timeout=60)
        said = dict(line.split("=", 1) for line in output.read_text(encoding="utf-8").splitlines())
        return {one for wave in json.loads(said["waves"]).values() for one in wave}, json.loads(said["labels"])


def test_a_deployment_brings_up_all_that_landed_since_the_last_one_that_succeeded(tmp_path: Path) -> None:
    """The run of the push in between may have failed, or made way for a newer one while it waited."""
    landed = Landed(tmp_path)
    first = landed.land("prod.us-east5")
    landed.land("prod.us-central1", "allow-loss")
    last = landed.land("dev.us-east4")
    assert landed.planned(deployed=first) == ({"prod.us-central1", "dev.us-east4"}, ["allow-loss"])
    assert landed.planned(deployed=last) == (set(), [])
    every = {"dev.global", "dev.us-east4", "prod.global", "prod.us-central1", "prod.us-east5"}
    for deployed in ("", "0" * 40):  # none yet, or one of a history that was rewritten
        assert landed.planned(deployed=deployed) == (every, [])
    assert landed.planned(deployed=last, everything="true")[0] == every


def test_a_job_may_pull_the_charts_that_the_stacks_name(tmp_path: Path) -> None:
    """The step itself, with a double in gcloud's place that writes down what it is asked for."""
    [step] = [one for one in read(ACTION)["runs"]["steps"] if "configure-docker" in one.get("run", "")]
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n', encoding="utf-8")
    gcloud.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", step["run"]], cwd=ROOT, env=environment, check=True, timeout=30)
    words = (tmp_path / "asked").read_text(encoding="utf-8").split()
    charts = [path.read_text(encoding="utf-8") for path in (ROOT / "stacks").glob("Pulumi.*.platform.yaml")]
    hosts = {host for text in charts for host in re.findall(r"oci://([^/]+)", text)}
    assert hosts
    assert set(words[-1].split(",")) == hosts
    (tmp_path / "asked").unlink()
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "Pulumi.local.global.yaml").touch()
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step["run"]], cwd=tmp_path, env=environment, check=True, timeout=30
    )
    assert not (tmp_path / "asked").exists()
