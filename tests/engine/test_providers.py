"""The engine with a shipped stack file: what names no provider is refused, and what the programs declare is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pulumi_gcp import compute

from spec.errors import EXIT_OK
from tests.builders.engine import declares, world
from tests.builders.stack_files import stack_text

pytestmark = pytest.mark.engine
STACK = "dev.global"


def test_a_forgotten_provider_fails_instead_of_using_whatever_project_is_chosen(tmp_path: Path) -> None:
    found = world(tmp_path)
    settings = found.place.work(STACK) / f"Pulumi.{STACK}.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(stack_text(STACK), encoding="utf-8")
    assert found.preview(STACK).exit_code == EXIT_OK
    forgotten = declares(lambda: compute.Network("net-1", name="net-1", auto_create_subnetworks=False))
    preview, _ = found.stack(STACK, declare=forgotten).preview()
    assert any("Default provider for 'gcp' disabled" in one.message for one in preview.diagnostics)
