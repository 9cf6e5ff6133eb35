"""What docs/services.md shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from services.registry import CLASSES, load_class
from spec.services import ServiceConfig

PAGE = (Path(__file__).parents[3] / "docs" / "services.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_service_of_the_page_answers_without_and_with_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    service, *uses = blocks("python")
    assert len([line for line in service.splitlines() if line.strip()]) <= 30
    for block in (service, *uses):
        exec(compile(block, "docs/services.md", "exec"), scope)  # the page is ours
    assert capsys.readouterr().out == "[  0. 100.]\n"
    np.testing.assert_array_equal(scope["there"].tensors["sharpness"], [0, 100])


def test_the_services_of_the_page_are_valid() -> None:
    (text,) = blocks("yaml")
    found = {name: ServiceConfig.model_validate(one) for name, one in yaml.safe_load(text)["services"].items()}
    assert found["judge"].shared
    assert found["encoder"].model == "{bucket}/models/t5-v1_1-xl"


def test_every_method_of_every_kind_is_on_the_page() -> None:
    for kind, path in CLASSES.items():
        assert f"`{kind}`" in PAGE
        for method in load_class(path).methods:
            assert f"`{method.name}`" in PAGE, (kind, method.name)
