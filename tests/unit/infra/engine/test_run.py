"""Targets, places and events of a run; the engine itself is in tests/engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pulumi.automation import EngineEvent

from gkr.cluster.registry import ClusterEntry, add_entry
from infra.engine import clusters
from infra.engine.events import Record, plain
from infra.engine.place import Place
from infra.engine.targets import below, load, members
from infra.engine.tools import local
from infra.policy.resource import SECRET
from infra.review import read_preview
from infra.review.secrets import SIGNATURE
from infra.run import main
from spec.errors import EXIT_CONFIG, ConfigError
from spec.facts import ClusterFacts
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


def test_what_an_event_keeps_in_a_secrets_envelope_is_masked_as_in_a_previews_json() -> None:
    urn = "urn:pulumi:local.bed-a.platform::gkr::kubernetes:core/v1:Secret::gkr-0-keys"
    envelope = {SIGNATURE: "1b47061264138c4ac30d75fd1eb44270", "plaintext": '{"key": "hunter2"}'}
    asset = {SIGNATURE: "c44067f5952c0a294b673a41bacd8c17", "text": "shown"}
    inputs = {"data": envelope, "list": [{"inner": envelope}], "file": asset}
    new = {"type": "kubernetes:core/v1:Secret", "urn": urn, "custom": True, "inputs": inputs}
    record = Record(say=[].append)
    metadata = {"op": "create", "urn": urn, "type": new["type"], "new": new}
    record.take(event(resourcePreEvent={"metadata": metadata, "planning": True}))
    (step,) = record.digest()["steps"]
    assert step["newState"]["inputs"] == {"data": SECRET, "list": [{"inner": SECRET}], "file": asset}


def test_a_bare_region_is_the_cluster_that_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path}")
    with pytest.raises(ConfigError, match="no cluster of region us-east5") as refused:
        clusters.of_region("us-east5")
    assert "STACK=ENV.us-east5" in refused.value.hint
    for name, region in (("one", "us-east5"), ("two", "us-central1"), ("us-west1", "us-central1")):
        facts = ClusterFacts(name=name, region=region, backend="kubernetes", pools=[], bucket="gs://b")
        add_entry(ClusterEntry(name, "/kubeconfig", "context"), facts=facts)
    assert clusters.of_region("us-east5") == "one"
    assert clusters.of_region("us-west1") == "us-west1"
    with pytest.raises(ConfigError, match="two, us-west1 are all in region us-central1"):
        clusters.of_region("us-central1")


def test_a_stack_that_is_not_up_has_no_cluster_to_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path}")
    assert main(["clusters", "local.global"]) == EXIT_CONFIG
    assert "name the stack of a region" in capsys.readouterr().err


def test_marks_for_colors_are_taken_out() -> None:
    assert plain("<{%fg 1%}>error:<{%reset%}> no\n") == "error: no"
