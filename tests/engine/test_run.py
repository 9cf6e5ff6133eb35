"""What `make preview`, `make up` and `make down` print and return, with the real engine and the double."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.engine.place import place
from infra.run import main
from spec.errors import EXIT_CONFIG, EXIT_OK, EXIT_REFUSED
from tests.builders.gcp_double.cloud import Cloud
from tests.builders.platforms import IMAGE, PLATFORMS
from tests.builders.recorded_clouds import run_shipped

pytestmark = pytest.mark.engine
REGION, ONLY = "dev.us-east4", ("--only", "region", "--cloud", "double")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """A place of the test's own, and what is in its cloud."""
    monkeypatch.setenv("GKR_STACKS", str(tmp_path))
    return Cloud(place(double=True).cloud)


@pytest.mark.timeout(300)
def test_a_region_goes_up_with_what_is_below_it_and_down_again(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", REGION, *ONLY, "-o", "json"]) == EXIT_OK
    said = capsys.readouterr()
    (done,) = json.loads(said.out)
    assert (done["stack"], done["outputs"]["kubeconfig"]) == (REGION, "[secret]")
    assert "dev.global: is not up; bringing it up with the double" in said.err
    assert "made: gcp:container/nodePool:NodePool mega-spot" in said.err

    assert main(["down", "dev.global", "--cloud", "double"]) == EXIT_CONFIG
    assert f"make down STACK={REGION}" in capsys.readouterr().err

    assert main(["preview", REGION, *ONLY, "--set", "gpu_pools[0].driver=DEFAULT"]) == EXIT_REFUSED
    said = capsys.readouterr()
    assert "Look at these first" in said.out
    assert "LABEL=allow-loss" in said.err
    assert main(["up", REGION, *ONLY, "--set", "gpu_pools[0].driver=DEFAULT"]) == EXIT_REFUSED
    assert "gpuDriverVersion" in capsys.readouterr().out
    assert main(["up", REGION, *ONLY, "--set", "gpu_pools[0].driver=DEFAULT", "--label", "allow-loss"]) == EXIT_OK

    for stack in (REGION, "dev.global"):
        only = ONLY if stack == REGION else ONLY[2:]
        assert main(["down", stack, *only]) == EXIT_OK
    assert cloud.things() == []


def test_a_preview_changes_nothing_and_shows_gpus_by_reservation(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preview", "prod.us-east5", *ONLY]) == EXIT_OK
    said = capsys.readouterr()
    declared = run_shipped("prod.us-east5").resources
    made = [one for one in declared if one.custom and not one.type.startswith("pulumi:providers:")]
    assert f"### prod.us-east5: {len(made)} created" in said.out
    assert (
        "| us-east5 | H200 | ultra-east5 / ultra-east5-block-0001 (example-gkr-prod) | 0 | 2560 | +2560 |" in said.out
    )
    assert "bringing it up aside" in said.err
    assert cloud.things() == []


def test_what_takes_too_long_is_interrupted_and_says_how_to_go_on(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preview", "dev.global", "--cloud", "double", "--deadline-minutes", "0.02"]) == 4
    assert "--deadline-minutes" in capsys.readouterr().err
    assert cloud.things() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLATFORMS)
def test_every_shipped_platform_can_be_previewed(cloud: Cloud, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Its environment and region are brought up aside; on a bed that is up, its API server answers."""
    by_digest = () if name.startswith("local.") else ("--set", f"site.image={IMAGE}")
    assert main(["preview", name, "--cloud", "double", "-o", "json", *by_digest]) == EXIT_OK, capsys.readouterr()
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["stack"], found["blocked"]) == (name, [])
    assert 60 < found["counts"]["create"] < 300
    assert cloud.things() == []
