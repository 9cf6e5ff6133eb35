"""Namespaces and secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pulumi
import pytest

from infra.components.k8s.namespaces import content_objects, namespace_objects, referred_secrets
from infra.facts import NAMESPACE
from infra.programs.platform_stack import platform_program, secret_values
from spec.errors import ConfigError
from spec.facts import Site
from tests.builders.platforms import chart_folders, outputs, platform
from tests.builders.recorded_stack import record

SITE = Site(service_account="gkr-experiment", bucket_secret="gkr-bucket", image_pull_secrets=["registry"])


def test_only_namespaces_of_experiments_are_queued() -> None:
    labels = {one["metadata"]["name"]: one["metadata"]["labels"] for one in namespace_objects([NAMESPACE, "gkr-0"])}
    assert labels == {"gkr-system": {}, "gkr-0": {"gkr/managed": "true"}}


def test_every_namespace_has_the_account_without_rights_and_is_closed() -> None:
    objects = content_objects([NAMESPACE, "gkr-0"], site=SITE, secrets={})
    accounts = [one for one in objects if one["kind"] == "ServiceAccount"]
    assert [one["metadata"]["namespace"] for one in accounts] == ["gkr-system", "gkr-0"]
    assert all(one["automountServiceAccountToken"] is False for one in accounts)
    policies = {
        (one["metadata"]["namespace"], one["metadata"]["name"]): one["spec"]
        for one in objects
        if one["kind"] == "NetworkPolicy"
    }
    assert set(policies) == {("gkr-0", "closed"), ("gkr-0", "metrics"), ("gkr-system", "metrics")}
    assert policies["gkr-0", "closed"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    [rule] = policies["gkr-0", "metrics"]["ingress"]
    assert [one["port"] for one in rule["ports"]] == [8080, 9464]
    assert not [one for one in content_objects(["gkr-0"], site=Site(), secrets={}) if one["kind"] == "ServiceAccount"]


def test_what_pods_refer_to() -> None:
    assert referred_secrets(SITE) == ["gkr-bucket", "registry"]
    assert referred_secrets(Site()) == []


def test_secrets_that_nothing_refers_to_and_wrong_forms_are_refused_without_their_values() -> None:
    assert secret_values(None, referred=[]) == {}
    for text in ("not json", '["a"]', '{"a": "b"}', '{"a": {"b": 1}}'):
        with pytest.raises(ConfigError, match="is not JSON of Secret"):
            secret_values(text, referred=["a"])
    with pytest.raises(ConfigError) as refused:
        secret_values('{"other": {"key": "hunter2"}}', referred=["gkr-bucket"])
    assert "other" in refused.value.message
    assert "hunter2" not in str(refused.value)


def test_configured_secrets_are_in_every_namespace_and_never_in_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in chart_folders(tmp_path).items():
        monkeypatch.setenv(key, value)
    text = json.dumps({"gkr-bucket": {"AWS_SECRET_ACCESS_KEY": "hunter2"}})
    name = "local.bed-a.platform"
    config = platform(name)
    pulumi.runtime.set_all_config({"gkr:secrets": text})
    try:
        recorded = record(
            platform_program(name, config=config), stack=name,
            references={config.region_stack: outputs(config.region_stack)},
        )  # fmt: skip
    finally:
        pulumi.runtime.set_all_config({})
    secrets = recorded.of("kubernetes:core/v1:Secret")
    assert {one.inputs["metadata"]["namespace"] for one in secrets} == {"gkr-system", "gkr-0", "gkr-1"}
    assert all(one.secret_inputs == ("stringData",) for one in secrets)
    assert "hunter2" not in json.dumps([one.inputs for one in recorded.resources])
    assert "hunter2" not in json.dumps(recorded.outputs)
