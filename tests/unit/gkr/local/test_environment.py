from __future__ import annotations

from pathlib import Path

from gkr.local.environment import child_environment
from tests.builders import local_runs


def test_children_get_the_plans_variables_and_what_a_run_on_one_machine_needs() -> None:
    environment = child_environment(
        {"HOME": "/home/x", "OMP_NUM_THREADS": "64", "NAME": "caller"}, plan_env={"NAME": "plan"}
    )
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["NAME"] == "plan"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"].split(":")[0] == f"{local_runs.REPOSITORY}"


def test_a_machine_without_the_roles_is_told_about_make_setup(tmp_path: Path) -> None:
    """In a process whose packages are only those of the role `cli`, by hiding the others from the import system."""
    hide = "import sys\nfrom importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
    hide += (
        "PathFinder.find_spec = staticmethod(lambda name, *a: None if name in {'torch', 'ray'} else find(name, *a))\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hide)
    (tmp_path / "x.yaml").write_text((local_runs.REPOSITORY / "recipes" / "digits.yaml").read_text())
    path = f"{tmp_path}:{local_runs.REPOSITORY}"
    ended = local_runs.gkr("launch", "x.yaml", cwd=tmp_path, PYTHONPATH=path)
    assert ended.returncode == 6
    assert "ray, torch" in ended.stderr or "torch, ray" in ended.stderr
    assert "make setup" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()
