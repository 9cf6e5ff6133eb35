"""What `make up` refuses against Google Cloud although its preview may be looked at. The engine is a double: it
previews what it is told to and notes whether it was asked to change anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import infra.run
from infra.engine import tools
from infra.engine.stacks import Stack
from infra.review import Preview, read_preview
from spec.errors import EXIT_OK, EXIT_REFUSED
from tests.builders.previews import digest, step

STACK = "prod.us-east5.platform"
IMAGE = "us-east5-docker.pkg.dev/example-gkr-prod/gkr/services@sha256:"
applied: list[str] = []
"""Stacks that somebody asked to bring up."""


class StackDouble(Stack):
    """A stack whose engine previews one Deployment."""

    sha = "0" * 64

    def preview(self) -> tuple[Preview, dict[str, Any]]:
        pod = {"spec": {"containers": [{"image": f"{IMAGE}{self.sha}"}]}}
        deployment = {"spec": {"template": pod}}
        steps = [step("create", "kubernetes:apps/v1:Deployment", "judge", new=deployment)]
        return read_preview(digest(steps), stack=self.name), {}

    def up(self) -> dict[str, int]:
        applied.append(self.name)
        return {"create": 1}

    def outputs(self) -> dict[str, Any] | None:
        return {"facts": {}}


def _nothing(*_args: object, **_more: object) -> None:
    """No binary is looked for."""


def _as_written(*_args: object, **_more: object) -> tools.Local:
    """A stack with nothing of this machine in it."""
    return tools.Local()


@pytest.fixture(autouse=True)
def _engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied.clear()
    monkeypatch.setenv("GKR_STACKS", str(tmp_path))
    monkeypatch.setattr(tools, "prepare", _nothing)
    monkeypatch.setattr(tools, "local", _as_written)
    monkeypatch.setattr(infra.run, "Stack", StackDouble)


def test_an_example_may_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert infra.run.main(["preview", STACK]) == EXIT_OK
    assert "placeholder-image" in capsys.readouterr().out


def test_an_example_is_not_brought_up_whatever_the_labels(capsys: pytest.CaptureFixture[str]) -> None:
    assert infra.run.main(["up", STACK, "--label", "allow-policy"]) == EXIT_REFUSED
    assert applied == []
    remedy = "make image NAME=services PUSH=us-east5-docker.pkg.dev/example-gkr-prod/gkr"
    assert remedy in capsys.readouterr().err


def test_the_double_takes_it_and_so_does_the_cloud_once_the_digest_is_real(monkeypatch: pytest.MonkeyPatch) -> None:
    assert infra.run.main(["up", STACK, "--cloud", "double"]) == EXIT_OK
    monkeypatch.setattr(StackDouble, "sha", "1" * 64)
    assert infra.run.main(["up", STACK]) == EXIT_OK
    assert applied == [STACK, STACK]
