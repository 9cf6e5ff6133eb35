"""Targets, places and events of a run; the engine itself is in tests/engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pulumi.automation import EngineEvent

from infra.engine.events import Record, plain
from infra.engine.place import Place
from infra.engine.targets import below, load, members
from infra.engine.tools import local
from infra.review import read_preview
from infra.run import main
from spec.errors import EXIT_CONFIG, ConfigError
from tests.builders.stack_files import NAMES


def event(**content: object) -> EngineEvent:
    return EngineEvent.from_json({"sequence": 1, "timestamp": 1, **content})


def test_a_region_includes_its_platform_unless_one_is_asked_for() -> None:
    region = "prod.us-east5"
    assert members(region) == [region, f"{region}.platform"]
    assert members(region, only="region") == [region]
    assert members(region, only="platform") == [f"{region}.platform"]
    assert members(f"{region}.platform") == [f"{region}.platform"]
    assert members("prod.global") == ["prod.global"]


def test_a_target_that_is_none_is_refused_with_the_near_name() -> None:
    with pytest.raises(ConfigError, match="us-east55") as refused:
        members("prod.us-east55")
    assert "prod.us-east5" in refused.value.hint
    with pytest.raises(ConfigError, match="global stack"):
        members("prod.global", only="platform")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_stack_builds_on_is_there_and_lowest_first(name: str) -> None:
    found = below(load(name).value)
    assert len(found) == {"global": 0, "platform": 2}.get(name.rpartition(".")[2], 1)
    assert all(one in NAMES for one in found)
    if found:
        assert found[0].endswith(".global")


def test_the_double_has_its_own_backend_whatever_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://somebody-elses-state")
    found = Place(tmp_path, double=True).environment()
    assert found["PULUMI_BACKEND_URL"] == f"file://{tmp_path}/state"
    assert found["PULUMI_HOME"].startswith(str(tmp_path))
    secret = Path(found["PULUMI_CONFIG_PASSPHRASE_FILE"])
    assert secret.stat().st_mode & 0o077 == 0
    assert len(secret.read_text(encoding="utf-8")) == 32
    assert "PULUMI_BACKEND_URL" not in Place(tmp_path, double=False).environment()


def test_without_a_backend_and_a_passphrase_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PULUMI_BACKEND_URL", "PULUMI_CONFIG_PASSPHRASE", "PULUMI_CONFIG_PASSPHRASE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PULUMI_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="passphrase") as refused:
        Place(tmp_path / "cloud", double=False).environment()
    assert "pulumi login" in refused.value.hint
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE", "x")
    assert Place(tmp_path / "cloud", double=False).environment()["PULUMI_BACKEND_URL"].startswith("file://")


def test_a_test_bed_needs_the_double() -> None:
    with pytest.raises(ConfigError, match="test bed") as refused:
        local("local.bed-a", double=False, say=print)
    assert "CLOUD=double" in refused.value.hint
    assert local("prod.us-east5", double=True, say=print).overrides == ()


def test_a_misspelt_stack_ends_with_the_exit_code_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "prod.us-eats5", "--cloud", "double"]) == EXIT_CONFIG
    said = capsys.readouterr()
    assert said.out == ""
    assert "TEST DOUBLE" in said.err
    assert "prod.us-east5" in said.err


def test_events_become_the_document_that_reviews_read() -> None:
    urn = "urn:pulumi:dev.us-east4::gkr::gkr:gcp:GpuPool$gcp:container/nodePool:NodePool::mega"
    state = {"type": "gcp:container/nodePool:NodePool", "urn": urn, "custom": True, "protect": True}
    metadata = {
        "op": "replace",
        "urn": urn,
        "type": state["type"],
        "old": {**state, "inputs": {"nodeCount": 2}},
        "new": {**state, "inputs": {"nodeCount": 3}, "retainOnDelete": True},
        "keys": ["nodeConfig"],
        "detailedDiff": {"nodeConfig.spot": {"diffKind": "add-replace", "inputDiff": True}},
    }
    said: list[str] = []
    record = Record(say=said.append)
    record.take(event(resourcePreEvent={"metadata": metadata, "planning": True}))
    wrong = {"message": "<{%reset%}>it failed<{%reset%}>", "severity": "error", "color": "never", "urn": urn}
    record.take(event(diagnosticEvent=wrong))
    record.take(event(diagnosticEvent={**wrong, "severity": "info"}))
    made = {"metadata": {**metadata, "op": "create"}, "planning": False}
    record.take(event(resOutputsEvent=made))
    preview = read_preview(json.dumps(record.digest()))
    (step,) = preview.steps
    assert preview.stack == "dev.us-east4"
    assert (step.kind, step.reasons) == ("replace", ("nodeConfig",))
    assert dict(step.detailed) == {"nodeConfig.spot": "add-replace"}
    assert step.protected
    assert step.new is not None
    assert step.new.retain_on_delete
    assert record.errors() == ["it failed"]
    assert said == ["made: gcp:container/nodePool:NodePool mega"]


def test_marks_for_colors_are_taken_out() -> None:
    assert plain("<{%fg 1%}>error:<{%reset%}> no\n") == "error: no"
