"""What each shipped platform stack declares, compared with what was looked at and accepted.

A name that changes here is an object that the engine deletes and makes anew, unless an alias comes with it. After a
change that is meant: `GKR_UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/golden/infra`, then read the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.policy.kubernetes import containers
from tests.builders.golden import check_golden
from tests.builders.platforms import PLATFORMS, chart_folders, run_platform
from tests.builders.recorded_stack import Recorded

EXPECTED = Path(__file__).parent / "platforms"
WHOLE = ("ResourceFlavor", "ClusterQueue", "Network", "GKENetworkParamSet", "Service", "ClusterRole", "Chart")
"""Kinds whose inputs are kept in full."""


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in chart_folders(tmp_path).items():
        monkeypatch.setenv(key, value)


def _kept(one: Recorded, *, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"type": one.type, "name": one.name, "in": list(one.parents)}
    if one.aliases:
        found["aliases"] = list(one.aliases)
    kind = one.type.split(":")[-1]
    if kind in WHOLE:
        inputs = {key: value for key, value in one.inputs.items() if key not in ("apiVersion", "kind", "metadata")}
        found["inputs"] = yaml.safe_load(yaml.safe_dump(inputs).replace(str(folder), "(charts)"))
    elif images := sorted({part["image"] for part in containers(one.inputs)}):
        found["images"] = images
    elif one.type == "gcp:monitoring/alertPolicy:AlertPolicy":
        found["query"] = one.inputs["conditions"][0]["conditionPrometheusQueryLanguage"]["query"]
    return found


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_declares_what_was_accepted(name: str, tmp_path: Path) -> None:
    kept = [_kept(one, folder=tmp_path) for one in run_platform(name).resources]
    kept.sort(key=lambda one: (one["type"], one["name"]))
    actual = yaml.safe_dump(kept, sort_keys=False, width=120, allow_unicode=True)
    path = EXPECTED / f"{name}.yaml"
    check_golden(actual, path=path)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in EXPECTED.glob("*.yaml")} == set(PLATFORMS)
