"""Writes the hash locks under requirements/: `make lock`.

One lock per role and one for all, compiled from pyproject.toml with hashes and without any index address. The locks of
the roles are constrained by the lock of all, so that a version is the same everywhere.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
UV_VERSION = "0.13.8"
FLAGS = [
    "--python-version",
    "3.11",
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-header",
    "--no-annotate",
    "--quiet",
]
ROLES = {
    "cli": ["cli"],
    "services": ["services", "encoder"],
    "training": ["training"],
    "infra": ["infra"],
    "dev": ["dev"],
}


def main() -> int:
    """Compile every lock; `--upgrade` takes the newest versions that pyproject.toml allows."""
    upgrade = ["--upgrade"] if "--upgrade" in sys.argv[1:] else []
    (REQUIREMENTS / "uv.in").write_text(f"uv=={UV_VERSION}\n")
    _compile([str(REQUIREMENTS / "uv.in")], target="uv.txt", extra=[])
    (REQUIREMENTS / "uv.in").unlink()
    source = str(ROOT / "pyproject.toml")
    # setuptools builds the editable install without isolation, so it belongs to the lock.
    (REQUIREMENTS / "build.in").write_text("setuptools>=80\n")
    build = str(REQUIREMENTS / "build.in")
    _compile([source, build], target="all.txt", extra=["--all-extras", *upgrade])
    for role, extras in ROLES.items():
        flags = [flag for extra in extras for flag in ("--extra", extra)]
        _compile([source, build], target=f"{role}.txt", extra=[*flags, "--constraint", str(REQUIREMENTS / "all.txt")])
    (REQUIREMENTS / "build.in").unlink()
    return 0


def _compile(sources: list[str], *, target: str, extra: list[str]) -> None:
    uv = Path(sys.executable).parent / "uv"
    command = [str(uv), "pip", "compile", *FLAGS, *extra, *sources, "-o", str(REQUIREMENTS / target)]
    subprocess.run(command, check=True, timeout=600, cwd=ROOT)
    sys.stderr.write(f"wrote requirements/{target}\n")


if __name__ == "__main__":
    sys.exit(main())
