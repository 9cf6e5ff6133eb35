"""An environment with one role only must import that role, run its help and load every document that the role ships.

What is not installed cannot be imported, so this finds what a lazy import in a full environment hides.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"

_IMPORT = (
    "import importlib, pathlib, sys\n"
    "for package in sys.argv[1].split(','):\n"
    "    for path in sorted(pathlib.Path(package).rglob('*.py')):\n"
    "        name = '.'.join(path.with_suffix('').parts).removesuffix('.__init__')\n"
    "        if not name.endswith('__main__'):\n"
    "            importlib.import_module(name)\n"
)
ROLES = {
    "cli": (
        "spec,storage,manifests,gkr",
        [["-m", "gkr", "--help"], ["-m", "gkr", "plan", "recipes/digits.yaml"], ["-m", "spec.schemas", "--check"]],
    ),
    "services": ("spec,storage,services", [["-m", "services.prepare", "--help"]]),
    "infra": ("spec,manifests,infra", [["-c", "import infra"]]),
    "training": ("spec,storage,training", [["-m", "training.sync.server", "--help"]]),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_role_stands_alone(role: str, tmp_path: Path) -> None:
    """Slow because it makes a real environment; packages are linked from uv's cache, which `make setup` filled."""
    packages, commands = ROLES[role]
    venv = tmp_path / "venv"
    environment = {**os.environ, "UV_LINK_MODE": "symlink", "UV_NO_PROGRESS": "1"}
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, venv], check=True, timeout=60, env=environment)
    python = venv / "bin" / "python"
    install = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        "--require-hashes",
        "-r",
        ROOT / "requirements" / f"{role}.txt",
    ]
    subprocess.run(install, check=True, timeout=300, env=environment)
    runs = [["-c", _IMPORT, packages.replace(".", "/")], *commands]
    for arguments in runs:
        done = subprocess.run(
            [python, *arguments],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, (
            f"{role}: {' '.join(map(str, arguments))[:60]}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
        )
