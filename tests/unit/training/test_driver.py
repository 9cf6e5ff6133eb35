"""What a driver leaves behind, and what it finds of those before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from training import driver


def test_the_folder_of_a_killed_drivers_ray_is_removed_by_the_next_driver_of_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RAY_FOLDERS", tmp_path)
    run = tmp_path / "runs" / "r1"
    west = driver.ray_folder(run, learner="west")
    left = driver.ray_folder(run, learner="east")
    (left / "session_latest").symlink_to(left / "gone")
    (left / "sockets").mkdir()
    found = driver.ray_folder(run, learner="east")
    assert found != left
    assert sorted(tmp_path.glob("gkr-ray-*")) == sorted([west, found])
    assert len(found.name) <= len("gkr-ray-12345678-12345678"), "Ray's sockets in it have at most 107 characters"
