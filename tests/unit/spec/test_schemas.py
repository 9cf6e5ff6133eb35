"""The JSON Schemas in the repository are those of the models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spec.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from spec.schemas import DOCUMENTS, FOLDER, render, stale, write
from spec.schemas.__main__ import main


def test_the_schemas_in_the_repository_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == EXIT_OK, capsys.readouterr().err
    assert main(["--nope"]) == EXIT_USAGE


def test_what_is_not_current_is_found_and_mended(tmp_path: Path) -> None:
    assert write(tmp_path) == [f"{name}.json" for name in DOCUMENTS]
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    (tmp_path / "old.json").write_text("{}", encoding="utf-8")
    assert stale(tmp_path) == ["plan.json", "old.json"]
    write(tmp_path)
    assert stale(tmp_path) == []


def test_the_check_fails_when_a_schema_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spec.schemas.__main__.stale", lambda: stale(tmp_path))
    assert main(["--check"]) == EXIT_FAILED
    assert "run: python -m spec.schemas" in capsys.readouterr().err


def test_an_editor_sees_help_and_forbidden_keys() -> None:
    schema = json.loads((FOLDER / "experiment.json").read_text(encoding="utf-8"))
    assert schema["additionalProperties"] is False
    assert schema["properties"]["learners"]["description"].startswith("The learners, one per cluster.")
    assert schema["$defs"]["Resources"]["properties"]["memory"]["anyOf"][0]["type"] == "string"
    assert render("plan") == render("plan")
