"""Reservations as the cloud shows them against the pools that are bound to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.review import Preview, read_preview
from infra.review.__main__ import main
from infra.review.reservations import by_gcloud, check_reservations
from spec.stack_values import ReservationPath, parse_reservation
from tests.builders.previews import POOL, ULTRA_BLOCK, digest, step, ultra_pool

RESERVATION = "projects/example-gkr-prod/reservations/ultra-east5"


def described(**changes: Any) -> dict[str, Any]:
    """As the cloud's API gives it; a change is of the machines' properties where it is one of them."""
    properties: dict[str, Any] = {
        "machineType": "a3-ultragpu-8g",
        "guestAccelerators": [{"acceleratorType": "nvidia-h200-141gb", "acceleratorCount": 8}],
        "localSsds": [{"diskSizeGb": "375", "interface": "NVME"}] * 32,
    }
    own = {key: value for key, value in changes.items() if key in {*properties, "maintenanceInterval"}}
    found: dict[str, Any] = {
        "name": "ultra-east5",
        "specificReservation": {"count": "640", "instanceProperties": {**properties, **own}},
        "specificReservationRequired": True,
        "status": "READY",
    }
    return {**found, **{key: value for key, value in changes.items() if key not in own}}


def preview(*pools: dict[str, Any]) -> Preview:
    steps = [step("create", POOL, one["name"], new=one) for one in pools]
    return read_preview(digest(steps), stack="prod.us-east5")


def found(reservation: Mapping[str, Any] | str, *pools: dict[str, Any]) -> list[tuple[str, str]]:
    asked: list[tuple[str, str]] = []

    def describe(part: ReservationPath, zone: str) -> Mapping[str, Any] | str:
        asked.append((part.reservation, zone))
        return reservation

    result = check_reservations(preview(*(pools or (ultra_pool(),))), describe=describe)
    assert asked == [(RESERVATION, "us-east5-a")]
    assert all(one.remedy for one in result)
    return [(one.severity, one.message) for one in result]


def test_a_pool_like_its_reservation_is_fine() -> None:
    assert found(described()) == []
    assert found(described(maintenanceInterval=None, localSsds=[])) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machineType": "a3-megagpu-8g"}, "machine type is a3-ultragpu-8g and that of"),
        ({"maintenanceInterval": "PERIODIC"}, "maintenance interval is not set and that of"),
        ({"localSsds": [{"diskSizeGb": "375"}] * 16}, "has 16 local SSDs for each machine and the pool 32"),
        ({"specificReservationRequired": False}, "is not specific"),
        ({"status": "CREATING"}, "is CREATING; a pool that asks it for machines fails"),
    ],
)
def test_a_difference_that_would_cost_the_machines_is_refused(change: dict[str, Any], said: str) -> None:
    [(severity, message)] = found(described(**change))
    assert severity == "refuse"
    assert said in message
    assert RESERVATION in message


def test_pools_share_the_machines_of_their_reservation() -> None:
    second = {**ultra_pool(nodes=330), "name": "ultra-2"}
    [(severity, message)] = found(described(), ultra_pool(), second)
    assert severity == "refuse"
    assert "holds 640 machines and its pools want 650" in message
    assert found(described(status="CREATING"), ultra_pool(nodes=0)) == []


def test_a_reservation_that_cannot_be_read_blocks_nothing() -> None:
    [(severity, message)] = found("404 not found")
    assert severity == "warn"
    assert "404 not found" in message


def test_pools_without_a_reservation_ask_nobody() -> None:
    def nobody(part: ReservationPath, zone: str) -> Mapping[str, Any]:
        raise AssertionError((part, zone))

    assert check_reservations(preview(ultra_pool(capacity="spot")), describe=nobody) == []


def gcloud(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double in gcloud's place."""
    path = folder / "gcloud"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gcloud_is_asked_in_the_reservations_own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcloud(tmp_path, f"echo \"$@\" > {tmp_path}/asked; echo '{json.dumps(described())}'", monkeypatch)
    part = parse_reservation(ULTRA_BLOCK)
    assert by_gcloud(part, "us-east5-a") == described()
    words = (tmp_path / "asked").read_text(encoding="utf-8").split()
    assert words[:4] == ["compute", "reservations", "describe", "ultra-east5"]
    assert {"--project=example-gkr-prod", "--zone=us-east5-a"} <= set(words)
    gcloud(tmp_path, "echo 'ERROR: not found' >&2; exit 1", monkeypatch)
    assert by_gcloud(part, "us-east5-a") == "ERROR: not found"
    gcloud(tmp_path, "echo no JSON", monkeypatch)
    assert "something else than JSON" in str(by_gcloud(part, "us-east5-a"))
    (tmp_path / "gcloud").unlink()
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert by_gcloud(part, "us-east5-a") == "gcloud is not installed"


def test_a_difference_blocks_the_change_until_somebody_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gcloud(tmp_path, f"echo '{json.dumps(described(machineType='a3-megagpu-8g'))}'", monkeypatch)
    file = tmp_path / "preview.json"
    steps = [step("create", POOL, "ultra-1", new=ultra_pool(), protect=True)]
    file.write_text(digest(steps), encoding="utf-8")
    call = [f"{file}", "--stack", "prod.us-east5"]
    assert main(call) == 0
    capsys.readouterr()
    assert main([*call, "--reservations"]) == 6
    assert "the pool would get no machines" in capsys.readouterr().out
    assert main([*call, "--reservations", "--label", "allow-policy"]) == 0
