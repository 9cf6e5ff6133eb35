"""The command line on clusters, answered by a double of the API server: same words, same exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gkr.main import main
from spec.errors import (
    EXIT_CONFIG,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_UNFINISHED,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
)
from tests.builders.api_double import ApiDouble, serving
from tests.builders.cluster_runs import NAMESPACES, PAIR, TINY, facts, furnish, started


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path / 'gkr'}")
    monkeypatch.setenv("GKR_RUNS", f"{tmp_path / 'runs'}")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "pair.yaml").write_text(PAIR)
    return tmp_path


@pytest.fixture
def double(place: Path) -> Iterator[ApiDouble]:
    with serving(ApiDouble()) as running:
        furnish(running)
        running.put("Namespace", "gkr-system")
        document = facts(place / "bucket", name="published").model_dump_json()
        running.put("ConfigMap", "gkr-facts", namespace="gkr-system", data={"facts.json": document})
        running.kubeconfig(place / "kubeconfig")
        yield running


def _add(place: Path, name: str = "bed", *more: str) -> int:
    return main(["clusters", "add", name, "--kubeconfig", f"{place / 'kubeconfig'}", *more])


def test_cluster_is_added_from_its_facts_listed_and_used(
    double: ApiDouble, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _add(place) == EXIT_OK
    assert main(["clusters", "use", "bed"]) == EXIT_OK
    assert main(["clusters", "list", "--check", "-o", "json"]) == EXIT_OK
    (row,) = json.loads(capsys.readouterr().out.split("using bed\n")[1])
    assert (row["name"], row["default"], row["state"]) == ("bed", True, "answers")
    assert row["namespace"] == ", ".join(NAMESPACES)
    assert main(["plan", "tiny.yaml", "-o", "json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["learners"][0]["cluster"] == "bed"
    assert double.requests


def test_name_of_this_machine_is_no_name_of_a_cluster(double: ApiDouble, place: Path) -> None:
    assert _add(place, "local-0") == EXIT_CONFIG
    assert double.requests == []


def test_cluster_without_facts_says_how_to_give_them(
    double: ApiDouble, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del double.objects["ConfigMap", "gkr-system", "gkr-facts"]
    assert _add(place) == EXIT_NOT_FOUND
    assert "--facts FILE" in capsys.readouterr().err
    (place / "facts.json").write_text(facts(place / "bucket").model_dump_json())
    assert _add(place, "bed", "--facts", "facts.json") == EXIT_OK


def test_unknown_gpu_is_refused_before_any_call(double: ApiDouble, place: Path) -> None:
    _add(place)
    double.requests.clear()
    text = TINY.replace("cpu: 1, memory: 2Gi", "gpu: H200:8")
    (place / "gpu.yaml").write_text(text)
    (place / "odd.yaml").write_text(text.replace("H200", "H201"))
    groups = "groups: [{nodes: 1, resources: {gpu: H200:8}}, {name: b, nodes: 1, resources: {gpu: H100:8}}]"
    (place / "mixed.yaml").write_text(f"version: 1\nname: mixed\n{groups}\nrun: echo\n")
    codes = [main(["launch", f"{name}.yaml", "--cluster", "bed"]) for name in ("gpu", "odd", "mixed")]
    assert codes == [EXIT_CONFIG] * 3
    assert double.requests == []


def test_changed_facts_are_seen_at_launch(double: ApiDouble, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _add(place)
    capsys.readouterr()
    document = facts(place / "bucket").model_copy(update={"namespaces": ["gkr-1"]}).model_dump_json()
    double.put("ConfigMap", "gkr-facts", namespace="gkr-system", data={"facts.json": document})
    assert main(["launch", "tiny.yaml", "--cluster", "bed", "--dry-run=server", "-o", "json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["learners"][0]["namespace"] == "gkr-1"
    assert double.names("RayJob") == []


def test_dry_run_alone_asks_nobody(double: ApiDouble, place: Path) -> None:
    _add(place)
    double.requests.clear()
    assert main(["launch", "--dry-run", "tiny.yaml", "--cluster", "bed"]) == EXIT_OK
    assert double.requests == []


def test_render_is_a_stream_of_objects_and_nothing_else(
    double: ApiDouble, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(place)
    capsys.readouterr()
    assert main(["render", "tiny.yaml", "--cluster", "bed"]) == EXIT_OK
    stream = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [one["kind"] for one in stream][-1] == "RayJob"
    assert main(["render", "tiny.yaml", "--cluster", "bed", "-o", "json"]) == EXIT_OK
    listed = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in listed["items"]] == [one["kind"] for one in stream]
    assert main(["render", "tiny.yaml"]) == EXIT_CONFIG, "this machine has no objects"


def test_objects_of_two_clusters_are_never_in_one_stream(
    double: ApiDouble, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(place)
    _add(place, "far")
    capsys.readouterr()
    assert main(["render", "pair.yaml", "--cluster", "bed,far"]) == EXIT_USAGE
    assert "--only bed" in capsys.readouterr().err
    assert main(["render", "pair.yaml", "--cluster", "bed,far", "--only", "far"]) == EXIT_OK
    assert "west" in capsys.readouterr().out
    assert double.requests


def test_run_launched_elsewhere_is_listed_adopted_and_cancelled(
    double: ApiDouble, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(place)
    assert main(["launch", "tiny.yaml", "--cluster", "bed", "-d"]) == EXIT_OK
    started(double)
    monkeypatch.setenv("GKR_RUNS", f"{place / 'colleague'}")
    capsys.readouterr()
    assert main(["ps", "-o", "json"]) == EXIT_OK
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["experiment"], row["status"], row["exit_code"], row["path"]) == ("tiny", "running", EXIT_UNFINISHED, "")
    assert main(["describe", "tiny", "-o", "json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["status"]) == (row["run"], "running")
    assert main(["cancel", "tiny", "--now"]) == EXIT_OK
    assert double.names("RayJob") == []
    monkeypatch.setenv("GKR_RUNS", f"{place / 'runs'}")
    capsys.readouterr()
    assert main(["watch", "tiny", "-o", "json"]) == 103, "cancelled elsewhere, heard through the bucket"


def test_cluster_that_does_not_answer_does_not_hide_the_others(
    double: ApiDouble, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _add(place)
    main(["launch", "tiny.yaml", "--cluster", "bed", "-d"])
    text = (place / "kubeconfig").read_text()
    (place / "dead").write_text(text.replace(double.url, "http://127.0.0.1:9"))
    arguments = ["--kubeconfig", f"{place / 'dead'}", "--facts", "facts.json"]
    (place / "facts.json").write_text(facts(place / "bucket").model_dump_json())
    assert main(["clusters", "add", "dead", *arguments]) == EXIT_OK
    capsys.readouterr()
    assert main(["ps"]) == EXIT_OK
    shown = capsys.readouterr()
    assert "tiny" in shown.out
    assert "cluster dead: cannot reach the API server" in shown.err
    assert main(["launch", "tiny.yaml", "--cluster", "dead"]) == EXIT_UNREACHABLE


def test_resume_is_for_this_machine_only(double: ApiDouble, place: Path) -> None:
    _add(place)
    main(["launch", "tiny.yaml", "--cluster", "bed", "-d"])
    assert main(["resume"]) == EXIT_REFUSED
    assert double.names("RayJob")


def test_listing_without_a_cluster_imports_neither_pydantic_nor_a_client(place: Path) -> None:
    script = (
        "import sys; from gkr.main import main; code = main(['ps']); "
        "bad = {'pydantic', 'lightkube', 'yaml', 'obstore', 'rich'} & set(sys.modules); sys.exit(f'{bad or code}')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "0", done.stderr
