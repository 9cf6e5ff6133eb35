"""What holds for every shipped stack: it is small, and every resource names its provider. One that does not would use
whatever project a person or a job happens to have chosen; the stack files tell the engine to refuse it, and the
programs must not need that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.builders.platforms import PLATFORMS, chart_folders, run_platform
from tests.builders.recorded_clouds import run_shipped
from tests.builders.stack_files import NAMES, shipped, stack_text

OWN = "gkr:"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_relies_on_a_default_provider(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in chart_folders(tmp_path).items():
        monkeypatch.setenv(key, value)
    recorded = run_platform(name) if name in PLATFORMS else run_shipped(name)
    providers = [one for one in recorded.resources if one.type.startswith("pulumi:providers:")]
    assert providers
    for one in recorded.resources:
        if one in providers:
            assert one.type.endswith(":kubernetes") or one.inputs["project"] == shipped(name).value.project
        elif not one.type.startswith(OWN):  # a component of ours is a name only; a chart has resources of its own
            assert one.provider in {provider.name for provider in providers}, f"{one.type} {one.name}"


@pytest.mark.parametrize("name", [one for one in NAMES if not one.startswith("local.")])
def test_a_stack_file_tells_the_engine_to_refuse_default_providers(name: str) -> None:
    assert yaml.safe_load(stack_text(name))["config"]["pulumi:disable-default-providers"] == ["*"]


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_is_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine adds what the two charts hold; regions are counted with their own tests."""
    for key, value in chart_folders(tmp_path).items():
        monkeypatch.setenv(key, value)
    assert 10 < len(run_platform(name).resources) < 200
